"""Measures dispatch policies on simulated fleets: how long a step takes under each.

The queue, the policies and work stealing are the broker's own; only the generators are emulated (`emulated_fleet`).
"""
