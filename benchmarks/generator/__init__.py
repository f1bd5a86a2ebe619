"""Measures the cost of in-flight updates in a real engine, and its best concurrency."""
