"""Trainers for tests: served, killed at a stated moment, or spread over two processes."""
