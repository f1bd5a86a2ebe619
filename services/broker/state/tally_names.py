"""What the tallies of steps are called among a run's records; see `tallies`. Pure."""

from __future__ import annotations

_MARK = "\t"
"""Tallies' names begin with it; a group id cannot, for it is not printable."""


def tally_name(version: int) -> str:
    """The name of the tally of the step that made `version`."""
    return f"{_MARK}{version}"


def is_tally(name: str) -> bool:
    """Whether a record's name is a tally's."""
    return name.startswith(_MARK)


def tally_version(name: str) -> int:
    """The step whose tally has that name."""
    return int(name[len(_MARK) :])
