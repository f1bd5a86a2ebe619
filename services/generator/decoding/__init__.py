"""Leased and unleased samples on their way through the engine: slots, headroom, leases, drain.

Knows the engine's interface and the broker's streams. No HTTP and no installation of weights.
"""
