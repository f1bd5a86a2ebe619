"""Reads a run folder's files in bounded memory: they may be cut short, hold nonsense, grow or be replaced meanwhile."""
