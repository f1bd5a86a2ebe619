"""Solvers: from a problem's cost model to a plan. One file each, the same interface.

They know no clock, wire or service. Helpers that several solvers share stand beside them.
"""
