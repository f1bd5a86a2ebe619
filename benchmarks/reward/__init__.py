"""Measures the reward service."""
