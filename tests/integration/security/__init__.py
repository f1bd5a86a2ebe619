"""Processes whose certificates fail or are renewed."""
