"""Calls of the scheduler."""
