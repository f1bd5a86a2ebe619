"""Continuous batching in simulated time, by hand and against closed forms."""
