"""Publishing of policy versions: files, manifests, deltas, relays and broadcasts to receivers.

Knows files and receivers, but neither the model nor the optimiser.
"""
