"""Metrics, events, summaries and trackers."""
