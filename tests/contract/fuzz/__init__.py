"""Malformed and hostile requests: refused with a stated reason, nothing crashes, nothing grows."""
