"""Stores: where records and payload are kept.

The in-memory store and, in `redis`, the durable one. They know the protocol in `records`, and no stream or service.
"""
