"""Explains what stalls a run's work: the causes, and the report of what waits for what.

Pure and read-only: it explains a state and never changes it.
"""
