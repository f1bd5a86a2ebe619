"""The user interface: the `penstock` command, the local launcher, the live view and the report of a run."""
