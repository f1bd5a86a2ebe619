"""Describes where a group under way stands in the queues of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from sortedcontainers import SortedList

from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.situation import Order, Rank
from services.broker.records.store import SampleId
from services.broker.records_pb2 import GroupRecord, SampleRecord

Leases = dict[str, dict[str, SampleId]]
"""Samples by lease id, for each holder."""
FinishedKey = tuple[int, int, int, int]
"""Task (`next_task`), 0 for evaluation or 1, sequence of the group, sample index."""
ScoringTask: TypeAlias = broker_pb2.ScoringTask.ValueType
REWARD, REFERENCE = broker_pb2.SCORING_TASK_REWARD, broker_pb2.SCORING_TASK_REFERENCE_LOGPROBS


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


def next_task(sample: SampleRecord) -> ScoringTask:
    """What a finished sample waits for: its reward or, once it has that, the reference's log-probs."""
    return REFERENCE if sample.HasField("score") else REWARD


def finished_key(group: GroupRecord, index: int) -> FinishedKey:
    """Where a finished sample stands in the queue."""
    is_training = int(group.purpose == types_pb2.PURPOSE_TRAIN)
    return next_task(group.samples[index]), is_training, group.sequence, index


def waiting_for(finished: SortedList[FinishedKey], task: ScoringTask) -> Iterator[FinishedKey]:
    """The finished samples that wait for a task, evaluation first, then in order of submission."""
    found: Iterator[FinishedKey] = finished.irange((task, 0, 0, 0), (task + 1, 0, 0, 0), inclusive=(True, False))
    return found


def num_waiting_for(finished: SortedList[FinishedKey], task: ScoringTask) -> int:
    """How many finished samples wait for a task."""
    return int(finished.bisect_left((task + 1, 0, 0, 0)) - finished.bisect_left((task, 0, 0, 0)))


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
