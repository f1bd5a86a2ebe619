"""What is done with recorded trajectories: export from a run, replay into another, rescore.

The file formats are in `console.recording`.
"""
