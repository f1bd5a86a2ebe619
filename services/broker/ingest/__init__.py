"""Checks requests once on arrival, and decodes them.

Pure functions of a request. Checks that need the run's state belong in `operations`.
"""
