"""Folders that a trainer may use, and what it keeps there for its next start."""
