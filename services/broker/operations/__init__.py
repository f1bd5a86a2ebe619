"""The operations on a run: one file per group of operations on a RunState.

Functions that change the records and return an answer. No clock, I/O or streams: `runtime` commits the change.
"""
