"""What trainers and receivers agree on about a model: digests of its weights, LoRA layout, files of its folder.

No torch and no transformers.
"""
