"""Plans of runs in progress: the problem as it is now, stragglers, cost of a change, and when to change.

Plans are made in `planning`; this decides whether another one is worth its cost.
"""
