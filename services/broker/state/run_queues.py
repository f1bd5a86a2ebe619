"""Holds the queues of a run: which samples are to be leased, are held under a lease, or wait for a score.

Pure, and a function of the records that were added and not removed: the caller removes a group's record before it
changes it, and adds it again afterwards.
"""

from __future__ import annotations

from sortedcontainers import SortedList

from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.length_histogram import LengthCounts
from services.broker.dispatch.situation import Order, QueuedGroup, Rank
from services.broker.records.store import SampleId
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.state.news import News
from services.broker.state.queue_entry import (
    FinishedKey,
    Leases,
    QueueEntry,
    finished_key,
    predicted_tokens,
    remove_leases,
)

_QUEUED, _LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
_FINISHED, _SCORING = broker_pb2.SAMPLE_STATE_FINISHED, broker_pb2.SAMPLE_STATE_SCORING
_SEALING = broker_pb2.SAMPLE_STATE_SEALING


class RunQueues:
    """See the module."""

    def __init__(self) -> None:
        self._ranks: dict[Order, SortedList[Rank]] = {order: SortedList() for order in Order}
        """Groups with samples to lease, in each order; a rank ends with the group's sequence."""
        self.queued_lengths = LengthCounts()
        """Forecast lengths of the queued samples."""
        self.leased_lengths = LengthCounts()
        """Forecast lengths of the samples that generators hold."""
        self.finished: SortedList[FinishedKey] = SortedList()
        self.generation_leases: Leases = {}
        self.scoring_leases: Leases = {}
        self.sealing: set[SampleId] = set()
        """Samples whose token shard has not said yet how many tokens they have."""
        self._waiting: dict[int, set[str]] = {types_pb2.PURPOSE_TRAIN: set(), types_pb2.PURPOSE_EVALUATE: set()}
        """By purpose: groups none of whose samples was ever leased."""
        self._entries: dict[str, QueueEntry] = {}
        self._news = News(is_all=True)

    def queued_in(self, order: Order) -> SortedList[Rank]:
        """Groups with samples to lease, in an order; by arrival if the run keeps no other."""
        ranks, by_arrival = self._ranks[order], self._ranks[Order.ARRIVAL]
        return ranks if len(ranks) == len(by_arrival) else by_arrival

    def num_waiting(self, purpose: int) -> int:
        """Groups of a purpose none of whose samples was ever leased."""
        return len(self._waiting[purpose])

    def num_held(self, purpose: int) -> tuple[int, int]:
        """Groups of a purpose of which a generator holds a sample; and others of which one waits for its score."""
        entries = [entry for entry in self._entries.values() if entry.purpose == purpose]
        num_leased = sum(bool(entry.generation) for entry in entries)
        return num_leased, sum(bool(entry.finished or entry.scoring) and not entry.generation for entry in entries)

    def take_news(self) -> News:
        """What changed since the last call."""
        news, self._news = self._news, News()
        return news

    def add(self, group: GroupRecord, *, is_started: bool, by_length_of: int | None) -> None:
        """Queue what a group under way waits for.

        Args:
            group: Its record.
            is_started: Whether work on it has started or is about to.
            by_length_of: Groups of a step, if the run's dispatch uses lengths; None if it does not.
        """
        group_id = group.group_id
        entry = self._entries[group_id] = QueueEntry(group.purpose, length=predicted_tokens(group))
        num_queued = 0
        for index, sample in enumerate(group.samples):
            if sample.state == _QUEUED:
                num_queued += 1
            else:
                self._add_sample(entry, group, index, sample)
        self.leased_lengths.add(entry.length, len(entry.generation))
        if num_queued:
            self._queue(entry, group, num_queued, is_started=is_started, by_length_of=by_length_of)
            if not any(sample.num_leases for sample in group.samples):
                self._waiting[group.purpose].add(group_id)

    def remove(self, name: str) -> None:
        """Take a group out of every queue, if it is in any."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        for order, rank in entry.ranks.items():
            self._ranks[order].discard(rank)
        self.queued_lengths.add(entry.length, -entry.num_queued)
        self.leased_lengths.add(entry.length, -len(entry.generation))
        for finished in entry.finished:
            self.finished.discard(finished)
        self._news.holders.update(holder for holder, _lease_id in entry.generation)
        remove_leases(self.generation_leases, entry.generation)
        remove_leases(self.scoring_leases, entry.scoring)
        self.sealing.difference_update(entry.sealing)
        for groups in self._waiting.values():
            groups.discard(name)

    def _queue(
        self, entry: QueueEntry, group: GroupRecord, num_queued: int, *, is_started: bool, by_length_of: int | None
    ) -> None:
        self._news.has_queued = True
        queued = QueuedGroup(
            sequence=group.sequence,
            is_evaluation=group.purpose == types_pb2.PURPOSE_EVALUATE,
            is_started=is_started,
            predicted_tokens=entry.length,
        )
        entry.ranks[Order.ARRIVAL] = queued.rank_by_arrival
        if by_length_of is not None:
            entry.ranks[Order.LENGTH] = queued.rank_by_length(by_length_of)
        for order, rank in entry.ranks.items():
            self._ranks[order].add(rank)
        entry.num_queued = num_queued
        self.queued_lengths.add(entry.length, num_queued)

    def _add_sample(self, entry: QueueEntry, group: GroupRecord, index: int, sample: SampleRecord) -> None:
        key = (group.group_id, index)
        if sample.state == _LEASED:
            self.generation_leases.setdefault(sample.generator_id, {})[sample.lease_id] = key
            entry.generation.append((sample.generator_id, sample.lease_id))
            self._news.holders.add(sample.generator_id)
        elif sample.state == _SCORING:
            self.scoring_leases.setdefault(sample.worker_id, {})[sample.scoring_lease_id] = key
            entry.scoring.append((sample.worker_id, sample.scoring_lease_id))
        elif sample.state == _SEALING:
            self.sealing.add(key)
            entry.sealing.append(key)
        elif sample.state == _FINISHED:
            finished = finished_key(group, index)
            self.finished.add(finished)
            entry.finished.append(finished)
            self._news.has_finished = True
