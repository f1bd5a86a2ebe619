"""The brokers of one store among themselves: who lives, who owns which part of a run, and calls from one to another.

Nothing here decides what happens to a run; safety never depends on who owns what.
"""
