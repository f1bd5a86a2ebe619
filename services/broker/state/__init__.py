"""A run in memory: its records, the queues and counters derived from them, and their audit.

Pure data with invariants: no clock and no I/O. Operations on a run are in `operations`.
"""
