"""The memory of a process and of its machine."""
