"""Checkpoints on disk: whole or not there, written beside training.

Knows files and bytes; which tensors are saved is decided in `model_state`.
"""
