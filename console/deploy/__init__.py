"""Turns a plan into the files that start it: a compose file and the services' configurations for each site.

Writes files only; nothing is started here.
"""
