"""Compares the planner and the simulator with published results."""
