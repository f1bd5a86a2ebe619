"""Sessions of agents: their turns, their groups, and their way to the broker as trajectories.

Exact tokens and bookkeeping. No HTTP and no decoding.
"""
