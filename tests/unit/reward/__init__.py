"""Reward models and the worker's pool."""
