"""Dispatch policies on simulated fleets: how long a step takes under each."""
