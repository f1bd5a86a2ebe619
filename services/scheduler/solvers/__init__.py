"""Solvers: from a problem's cost model to a plan. One file each, the same interface."""
