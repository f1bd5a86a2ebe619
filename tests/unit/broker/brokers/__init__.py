"""Who lives and who owns what, on a virtual clock."""
