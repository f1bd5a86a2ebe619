"""Errors of calls, streams, health and waiting for peers."""
