"""Exports trajectories from a run, replays them into another, and rescores them.

The file formats are in `console.recording`.
"""
