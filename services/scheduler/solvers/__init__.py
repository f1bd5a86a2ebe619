"""Solvers turn a problem's cost model into a plan. One file each, behind the same interface.

They use no clock, wire or service. Helpers that several solvers share are beside them.
"""
