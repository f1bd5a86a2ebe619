"""Notices that a machine will be taken away."""
