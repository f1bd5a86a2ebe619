"""Dispatch: in which order waiting groups are offered to generators. Pure.

A policy gives each group a rank; the queue is kept sorted by it. Admission is not a policy's business: a group that may
not start is passed over, whatever its rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Rank = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedGroup:
    """What a policy may look at."""

    sequence: int
    """Order of submission."""
    is_evaluation: bool
    is_started: bool
    """Some of its samples are under way, done, or came back from a lost lease."""


class DispatchPolicy(Protocol):
    """Orders the queue."""

    def rank(self, group: QueuedGroup) -> Rank:
        """Smaller goes first; the second number is the sequence, so that no two groups share a rank."""
        ...


class FirstComeFirstServed:
    """Evaluation first (somebody waits for it), then what was begun (its siblings wait for it), then by submission."""

    def rank(self, group: QueuedGroup) -> Rank:
        """Class, then sequence."""
        if group.is_evaluation:
            return (0, group.sequence)
        return (1 if group.is_started else 2, group.sequence)
