"""The rules of a run: its limits, staleness, admission and batching.

Pure functions of numbers and settings, which the simulator runs too. No run state, no store, no network and no clock.
"""
