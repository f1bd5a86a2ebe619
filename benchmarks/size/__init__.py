"""A whole run at a real size: the shape of Qwen3-0.6B over the real services of `penstock run`."""
