"""Publishing of policy versions: files, manifests, deltas, relays and broadcasts to receivers.

Handles files and receivers, independent of the model and the optimiser.
"""
