"""Puts what a collector says into a line of a log."""

from __future__ import annotations

_MAX_SAID_CHARACTERS = 200


def plain(text: str) -> str:
    """What a stranger says, in one short line without what would move a terminal's cursor."""
    return "".join(each if each.isprintable() else " " for each in text[:_MAX_SAID_CHARACTERS])
