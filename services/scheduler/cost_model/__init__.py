"""Computes what a plan would achieve.

Pure functions of a problem and a plan; nothing is searched here.
"""
