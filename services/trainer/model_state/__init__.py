"""Saves and loads the tensors that resume training: optimiser state and distributed checkpoint files.

`checkpoints` decides where they lie on disk and when they are complete.
"""
