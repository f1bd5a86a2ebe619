"""Staleness policies: what a run does so that no sample is trained on beyond its staleness bound.

Here: the interface (`policy`), one file for each policy, and their `registry`.
Not here: queues, records and clocks; callers keep their own counters.
"""
