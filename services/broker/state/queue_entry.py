"""Describes where a group under way stands in the queues of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.broker.dispatch.situation import Order, Rank
from services.broker.records.store import SampleId
from services.broker.records_pb2 import GroupRecord

Leases = dict[str, dict[str, SampleId]]
"""Samples by lease id, for each holder."""
FinishedKey = tuple[int, int, int]
"""0 for evaluation or 1, sequence of the group, sample index."""


@dataclass(slots=True)
class QueueEntry:
    """The queue positions of a group under way, to remove it from the queues again."""

    purpose: int
    ranks: dict[Order, Rank] = field(default_factory=dict)
    length: float = 0.0
    """Forecast of the group's completions."""
    num_queued: int = 0
    finished: list[FinishedKey] = field(default_factory=list)
    generation: list[tuple[str, str]] = field(default_factory=list)
    scoring: list[tuple[str, str]] = field(default_factory=list)
    sealing: list[SampleId] = field(default_factory=list)


def predicted_tokens(group: GroupRecord) -> float:
    """Forecast length of the group's completions, 0 if unknown; siblings share it, as they share the prompt."""
    return group.samples[0].predicted_tokens if group.samples else 0.0


def remove_leases(leases: Leases, items: list[tuple[str, str]]) -> None:
    """Take leases out, by holder and id."""
    for holder, lease_id in items:
        held = leases[holder]
        del held[lease_id]
        if not held:
            del leases[holder]
