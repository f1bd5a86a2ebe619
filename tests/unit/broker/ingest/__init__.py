"""Checking what producers send, before anything is stored."""
