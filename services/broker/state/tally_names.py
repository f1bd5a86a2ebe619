"""Names the tallies of steps among a run's records; see `tallies`. Pure."""

from __future__ import annotations

_MARK = "\t"
"""Prefix of tallies' names; no group id begins with it, as it is not printable."""


def tally_name(version: int) -> str:
    """The name of the tally of the step that made `version`."""
    return f"{_MARK}{version}"


def is_tally(name: str) -> bool:
    """Whether a record's name is a tally's."""
    return name.startswith(_MARK)


def tally_version(name: str) -> int:
    """The step whose tally has this name."""
    return int(name[len(_MARK) :])
