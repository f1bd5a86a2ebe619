"""Samples under way: slots, KV headroom, leases, text."""
