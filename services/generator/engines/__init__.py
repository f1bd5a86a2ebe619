"""Holds the engines, one folder each, and the registry of their configurations, which build them.

Each depends only on `engine` and its own library; only an engine itself imports its heavy libraries.
"""
