"""Revises plans of runs in progress: the current problem, stragglers, cost of a change, and when to change.

Plans are made in `planning`; this package decides whether a new one is worth its cost.
"""
