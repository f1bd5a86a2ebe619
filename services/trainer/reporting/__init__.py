"""Reports on a run: metrics, events, progress, overlap, stall times, summary and trackers.

Observes training and never steers it.
"""
