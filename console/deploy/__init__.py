"""Turns a plan into the files that start it: what an engine runs at each site, and the services' configurations.

Writes files only; nothing is started here. `engines` has a writer for each engine.
"""
