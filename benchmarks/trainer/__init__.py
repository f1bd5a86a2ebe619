"""Measures the trainer: its learning, and its speed."""
