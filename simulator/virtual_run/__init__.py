"""Simulates whole runs on a virtual clock: a plan's generation, training and weight updates, by the broker's rules."""
