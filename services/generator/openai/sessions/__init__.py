"""Tracks agents' sessions: their turns, their groups, and their delivery to the broker as trajectories.

Exact tokens and bookkeeping, without HTTP or decoding.
"""
