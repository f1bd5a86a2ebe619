"""The one thread in which PyTorch works, and how a stop calls its passes off.

Knows the backend's protocol only; what is computed is decided in `step` and `run`.
"""
