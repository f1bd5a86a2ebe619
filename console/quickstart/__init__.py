"""The quick-start task: problems, a tiny model, its supervised warm start, and the cache that keeps them."""
