"""Checks of what clients send, once on arrival, and its decoded form.

Pure functions of a request. What needs the run's state to decide belongs in `operations`.
"""
