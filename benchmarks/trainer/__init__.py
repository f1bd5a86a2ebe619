"""Measurements of the trainer: what it learns, and how fast."""
