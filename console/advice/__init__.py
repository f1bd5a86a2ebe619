"""Advises on a run by its measured numbers: what limits it, and what would help."""
