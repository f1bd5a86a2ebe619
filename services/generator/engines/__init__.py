"""The engines: one folder each, and the factory that builds the one a configuration asks for.

Each knows `engine` and its own library only; heavy libraries are imported by their own engine alone.
"""
