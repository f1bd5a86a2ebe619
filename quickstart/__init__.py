"""Prepares the quick start's task: problems, a tiny model, its supervised warm start, and the cache that keeps them.

Services and commands do not import it: `penstock quickstart` runs `python -m quickstart`, so only a child loads torch.
"""
