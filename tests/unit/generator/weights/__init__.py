"""How versions are brought into the cache."""
