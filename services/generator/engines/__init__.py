"""Holds the engines, one folder each, the registry of their configurations, and the factory that builds them.

Each depends only on `engine` and its own library; only an engine itself imports its heavy libraries.
"""
