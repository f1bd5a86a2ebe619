"""The one thread in which PyTorch works, and rules for background tasks.

Knows the backend's protocol only; what is computed is decided in `step` and `run`.
"""
