"""Runs fleets of emulated GPUs through real services: the value of dispatch, and the cost of a generator's death."""
