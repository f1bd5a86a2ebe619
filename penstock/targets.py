"""Addresses of interchangeable servers, as text."""

from __future__ import annotations

import re

MAX_TARGETS = 16
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def split_targets(targets: str) -> list[str]:
    """The servers that a string of host:port, separated by commas, names; raises ValueError."""
    names = [name.strip().removeprefix("grpc://") for name in targets.split(",")]
    if not all(names) or len(names) > MAX_TARGETS:
        raise ValueError(f"{targets!r}: name one to {MAX_TARGETS} servers as host:port, separated by commas")
    return names


def checked_address(value: str) -> str:
    """`value` when it is host:port; raises ValueError that says what is wrong with it."""
    match = _ADDRESS.fullmatch(value.removeprefix("grpc://"))
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError("must be host:port with a port of 1 to 65535, for example 127.0.0.1:7301")
    return value.removeprefix("grpc://")


def checked_addresses(value: str) -> str:
    """`value` when it is one or several host:port, separated by commas; raises ValueError."""
    return ",".join(checked_address(item) for item in split_targets(value))
