"""Addresses of servers that stand in for each other, as text."""

from __future__ import annotations

MAX_TARGETS = 16


def split_targets(targets: str) -> list[str]:
    """The servers that a string of host:port, separated by commas, names; raises ValueError."""
    names = [name.strip().removeprefix("grpc://") for name in targets.split(",")]
    if not all(names) or len(names) > MAX_TARGETS:
        raise ValueError(f"{targets!r}: name one to {MAX_TARGETS} servers as host:port, separated by commas")
    return names
