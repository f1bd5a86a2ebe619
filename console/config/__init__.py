"""Defines the configuration of a whole run, derives its services' from it, and manages the run's folder.

Reads configuration and writes small files of the run folder; opens no socket and starts nothing.
"""
