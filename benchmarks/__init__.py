"""Measurements of the services against stated targets; see docs/benchmarks.md."""
