"""Reward models that misbehave."""
