"""Supervision with real, tiny processes: restarts, logs, cores."""
