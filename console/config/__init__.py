"""The configuration of a whole run, what follows from it, and the folder that the run is kept in.

Reads configuration and writes small files of the run folder; opens no socket and starts nothing.
"""
