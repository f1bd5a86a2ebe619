"""Spans of groups and samples, written once their life has ended, from the times that the run's records keep.

Nothing is measured for them: what is not sampled, slow or failed costs a comparison. No store and no network.
"""
