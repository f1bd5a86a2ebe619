"""Checkpoints: whole or not there, and written beside training."""
