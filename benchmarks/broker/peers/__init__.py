"""Measures other systems for moving trajectories, in their own environments, beside the broker."""
