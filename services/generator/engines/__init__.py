"""The engines: one folder each, the registry of their configurations, and the factory that builds the one asked for.

Each knows `engine` and its own library only; heavy libraries are imported by their own engine alone.
"""
