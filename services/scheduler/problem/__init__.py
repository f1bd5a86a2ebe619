"""Defines planning problems and plans as checked documents, and checks whether they fit each other.

Types and their checks only: nothing is estimated or searched here.
"""
