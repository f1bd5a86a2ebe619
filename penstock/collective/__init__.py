"""Broadcasts of weights inside a site, over torch.distributed's NCCL and gloo."""
