"""The one thread in which PyTorch works, and how a stop calls its passes off.

Depends only on the backend's protocol; `step` and `run` decide what is computed.
"""
