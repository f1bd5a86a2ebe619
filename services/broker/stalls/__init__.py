"""What holds a run's work back: the causes, and the report of who waits for whom.

Pure and read-only: it explains a state and never changes it.
"""
