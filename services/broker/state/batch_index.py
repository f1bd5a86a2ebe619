"""Indexes a run's records by progress between start and training, with the derived counts. Pure.

Here: ready, delivered and trained records, the versions of live ones, and the groups and payload of a put's record.
Not here: samples that generators and reward workers still work on (`run_state`).

Invariants: everything here is a function of the records; a live record is ready, delivered or under way; a group is in
one record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from sortedcontainers import SortedList

from penstock.v1 import broker_pb2, types_pb2
from services.broker.records_pb2 import GroupRecord
from services.broker.state.batches import num_groups, oldest_version, sample_states, stored_bytes

_TRAIN, _EVALUATE = types_pb2.PURPOSE_TRAIN, types_pb2.PURPOSE_EVALUATE
_READY_STATES = frozenset((broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DROPPED))

_Key = TypeVar("_Key", int, str)
ReadyKey = tuple[int, int, str]
"""Oldest version (0 of an evaluation), sequence of the first group, record's name."""


@dataclass(slots=True)
class _Place:
    """A live record's share of the counts, to be subtracted again."""

    purpose: int
    oldest: int | None
    """Oldest version; None before the start."""
    num_groups: int
    states: list[tuple[broker_pb2.SampleState.ValueType, int]]
    ready: ReadyKey | None = None
    is_delivered: bool = False


class BatchIndex:
    """See the module. Operations may read all fields; only RunState calls the methods that change them."""

    def __init__(self) -> None:
        self.ready: dict[int, SortedList[ReadyKey]] = {_TRAIN: SortedList(), _EVALUATE: SortedList()}
        self.delivered: dict[int, set[str]] = {_TRAIN: set(), _EVALUATE: set()}
        self.trained: dict[int, set[str]] = {}
        """Trained records by step."""
        self.versions: dict[str, int] = {}
        """Oldest version of each live training record that is started."""
        self.record_of: dict[str, str] = {}
        """Record of each group that was put, by group id."""
        self.num_samples: Counter[broker_pb2.SampleState.ValueType] = Counter()
        """Live training samples by state."""
        self.num_started = self.num_ready = self.num_delivered = 0
        """Live training groups."""
        self.num_ready_puts = self.ready_bytes = 0
        """The groups of `num_ready` that were put, and their payload bytes."""
        self.trained_bytes: Counter[int] = Counter()
        """Payload of puts by the step that trained it."""
        self.retained_bytes: Counter[int] = Counter()
        """What trained records take in the store, by step."""
        self.live_bytes = 0
        """What live records take in the store."""
        self._stored_bytes: dict[str, int] = {}
        """What each record takes in the store."""
        self._num_started_by_version: Counter[int] = Counter()
        self._num_delivered_by_version: Counter[int] = Counter()
        self._trained_by: dict[str, int] = {}
        """Step by trained record."""
        self._places: dict[str, _Place] = {}
        self._payload_bytes: dict[str, int] = {}
        """Payload by record of a put."""
        self._num_uses: Counter[str] = Counter()
        """Number of records by payload id."""

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> Set[str]:
        """Records that are neither trained nor dropped."""
        return self._places.keys()

    def is_put(self, name: str) -> bool:
        """Whether a record's groups arrived finished."""
        return name in self._payload_bytes

    def stored_bytes(self, name: str) -> int:
        """Bytes that a record takes in the store."""
        return self._stored_bytes.get(name, 0)

    def is_used(self, payload_id: str) -> bool:
        """Whether any record uses a part of the payload."""
        return self._num_uses[payload_id] > 0

    def is_trained(self, name: str) -> bool:
        """Whether a step trained on the record."""
        return name in self._trained_by

    def is_started(self, name: str) -> bool:
        """Whether work on a live record has started or is about to."""
        return self._places[name].oldest is not None

    def is_ready(self, name: str, purpose: int) -> bool:
        """Whether a record of this purpose waits for the trainer."""
        place = self._places.get(name)
        return place is not None and place.ready is not None and place.purpose == purpose

    def first_ready(self, purpose: int, count: int) -> list[str]:
        """The next records to deliver: enough for `count` groups, or all."""
        found: list[str] = []
        for _oldest, _sequence, name in self.ready[purpose]:
            if count <= 0:
                break
            found.append(name)
            count -= self._places[name].num_groups
        return found

    def older_than(self, version: int) -> list[str]:
        """Live training records with samples older than `version`; cheap in the common case of none."""
        if not any(oldest < version for oldest in self._num_started_by_version):
            return []
        return [name for name, oldest in self.versions.items() if oldest < version]

    def num_due(self, version: int) -> int:
        """Number of started, undelivered training groups in records of `version` or older."""
        return sum(
            count - self._num_delivered_by_version[oldest]
            for oldest, count in self._num_started_by_version.items()
            if oldest <= version
        )

    def num_ready_due(self, version: int) -> int:
        """The number of those groups that are ready."""
        due: Iterator[ReadyKey] = takewhile(lambda key: key[0] <= version, self.ready[_TRAIN])
        return sum(self._places[name].num_groups for _oldest, _sequence, name in due)

    # -- changing ------------------------------------------------------------------------------------------------------

    def enter(self, record: GroupRecord) -> None:
        """Register a new record: its bytes, and the groups and payload of a put that it has."""
        num_bytes = self._stored_bytes[record.group_id] = stored_bytes(record)
        if record.HasField("put"):
            self._payload_bytes[record.group_id] = num_bytes
            self._num_uses[record.put.payload_id] += 1
            self.record_of.update(dict.fromkeys(record.put.group_ids, record.group_id))

    def leave(self, record: GroupRecord) -> None:
        """Unregister a record."""
        if not record.HasField("put"):
            return
        del self._payload_bytes[record.group_id]
        _add(self._num_uses, record.put.payload_id, -1)
        for group_id in record.put.group_ids:
            # A record that was split off may be registered for it already.
            if self.record_of.get(group_id) == record.group_id:
                del self.record_of[group_id]

    def forget(self, name: str) -> None:
        """Forget a record's bytes; it is not counted any more."""
        self._stored_bytes.pop(name, None)

    def grow(self, name: str, num_bytes: int) -> None:
        """Note that a record takes this many more bytes in the store, or fewer; it may be counted or being changed."""
        self._stored_bytes[name] = self._stored_bytes.get(name, 0) + num_bytes
        if name in self._places:
            self.live_bytes += num_bytes
        elif name in self._trained_by:
            _add(self.retained_bytes, self._trained_by[name], num_bytes)

    def add(self, record: GroupRecord) -> bool:
        """Count a record by its state; returns whether any of its samples are still under way."""
        name, purpose = record.group_id, record.purpose
        if record.HasField("trained_version"):
            self.add_trained(name, record.trained_version, self.stored_bytes(name))
            return False
        self.live_bytes += self.stored_bytes(name)
        oldest, states = oldest_version(record), sample_states(record)
        place = self._places[name] = _Place(purpose, oldest, num_groups(record), states)
        if oldest is not None and purpose == _TRAIN:
            self.versions[name] = oldest
        if record.consumer_id:
            place.is_delivered = True
            self.delivered[purpose].add(name)
        elif all(state in _READY_STATES for state, _count in states):
            place.ready = (self.versions.get(name, 0), record.sequence, name)
            self.ready[purpose].add(place.ready)
        if purpose == _TRAIN:
            self._count(name, place, 1)
        return not place.is_delivered and place.ready is None

    def add_trained(self, name: str, version: int, num_bytes: int) -> None:
        """Count a trained record that takes this many bytes in the store."""
        self._trained_by[name] = version
        self._stored_bytes[name] = num_bytes
        _add(self.retained_bytes, version, num_bytes)
        self.trained.setdefault(version, set()).add(name)
        if self.is_put(name):
            _add(self.trained_bytes, version, self._payload_bytes[name])

    def remove(self, name: str) -> None:
        """Remove a record from the counts, if present."""
        version = self._trained_by.pop(name, None)
        if version is not None:
            _add(self.retained_bytes, version, -self.stored_bytes(name))
            self.trained[version].discard(name)
            if not self.trained[version]:
                del self.trained[version]
            if self.is_put(name):
                _add(self.trained_bytes, version, -self._payload_bytes[name])
        place = self._places.pop(name, None)
        if place is None:
            return
        self.live_bytes -= self.stored_bytes(name)
        if place.purpose == _TRAIN:
            self._count(name, place, -1)
        self.versions.pop(name, None)
        if place.ready is not None:
            self.ready[place.purpose].remove(place.ready)
        elif place.is_delivered:
            self.delivered[place.purpose].discard(name)

    def lower_version(self, name: str, version: int) -> None:
        """Note that a counted record has tokens of `version`."""
        if version < self.versions.get(name, version):
            place = self._places[name]
            self._count(name, place, -1)
            self.versions[name] = place.oldest = version
            self._count(name, place, 1)

    def _count(self, name: str, place: _Place, sign: int) -> None:
        for state, count in place.states:
            self.num_samples[state] += sign * count
        if place.oldest is None:
            return
        count = sign * place.num_groups
        self.num_started += count
        _add(self._num_started_by_version, place.oldest, count)
        if place.is_delivered:
            self.num_delivered += count
            _add(self._num_delivered_by_version, place.oldest, count)
        elif place.ready is not None:
            self.num_ready += count
            if self.is_put(name):
                self.num_ready_puts += count
                self.ready_bytes += sign * self._payload_bytes[name]


def _add(counter: Counter[_Key], key: _Key, amount: int) -> None:
    """Add to a count; deletes keys at zero, which keeps the counter small."""
    if count := counter[key] + amount:
        counter[key] = count
    else:
        del counter[key]
