"""What can happen to a run: one file per group of operations on a RunState.

Functions that change the records and answer. No clock, no I/O and no stream: `runtime` commits the change.
"""
