"""Implements `penstock node`: a machine that runs the generators which a scheduler's plan assigns to it.

Reads its configuration and its assignment, and reports rates. `console.launch` starts the processes.
"""
