"""Spans: ids, settings, files."""
