"""Checkpoints on disk: whole or not there, written beside training.

Handles files and bytes only; `model_state` decides which tensors are saved.
"""
