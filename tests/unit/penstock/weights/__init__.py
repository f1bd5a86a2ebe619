"""Manifests, deltas, transfers and broadcast groups."""
