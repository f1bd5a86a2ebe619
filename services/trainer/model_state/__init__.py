"""Saves and loads the tensors that resume training: optimiser state and distributed checkpoint files.

Its place on disk and its completeness are the business of `checkpoints`.
"""
