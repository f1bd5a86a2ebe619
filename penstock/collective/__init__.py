"""Broadcasts of weights inside a site, over torch.distributed's NCCL and gloo.

Groups of processes and bytes; torch is imported inside functions only.
"""
