"""Finds problems with certificates: this process's own, and those of the servers it calls."""
