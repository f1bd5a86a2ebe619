"""Stores: where records and payload are kept.

The in-memory store and, in `redis`, the durable one. They know only the protocol in `records`, no stream or service.
"""
