"""The critic's own process: a trainer of values, called by a run's trainer step by step.

It is the trainer's critic with its optimiser, by the same code, which is what makes its numbers those of a critic in
the trainer. What it confirmed is on its disk: a checkpoint, and the packs of every optimiser step since (a journal),
from which it returns to any step that the trainer may go back to.
"""
