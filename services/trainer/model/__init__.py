"""The model in training: the backend's protocol, loading, attention over packs, LoRA, critic, precision.

One process's view. Several processes are in `distributed`, the loss is in `algorithms`.
"""
