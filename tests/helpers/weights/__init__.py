"""Scripted weight stores, sites behind links, and broadcasts."""
