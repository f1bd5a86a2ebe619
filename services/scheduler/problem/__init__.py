"""A planning problem and a plan as checked documents, and whether one fits the other.

Types and their checks only: nothing is estimated or searched here.
"""
