"""Says what a change of a run is about, so that it wakes only the streams that it concerns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class News:
    """What changed that someone may wait for; more may be named than did."""

    holders: set[str] = field(default_factory=set)
    """Generators whose leases changed."""
    has_queued: bool = False
    """Whether groups in the queue changed."""
    has_finished: bool = False
    """Whether samples wait to be scored."""
    is_all: bool = False
    """Whether anything may have changed."""
