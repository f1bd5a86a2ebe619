"""Runs whose tokens are in shards: who owns them, and one token stream to each of those brokers."""
