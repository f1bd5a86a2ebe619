"""Fleets of emulated GPUs through real services: what dispatch is worth, and what the death of a generator costs."""
