"""Whole runs on a virtual clock: generation, training and weight updates of a plan, under the broker's own rules."""
