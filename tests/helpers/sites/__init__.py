"""Two sites on one machine: hosts that are network namespaces, and a slow link between them that can be cut."""
