"""The parcels of a run: their records and the queues derived from them. Pure.

It is for parcels what RunState is for single groups.

Invariants: the queues are a function of the records; a parcel is ready, delivered or trained; a group is in one parcel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from sortedcontainers import SortedList

from penstock.v1 import broker_pb2
from services.broker.records.store import PayloadSlice
from services.broker.records_pb2 import ParcelRecord

_SCORED, _DELIVERED = broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DELIVERED
_MARK = "\n"
"""Parcels' names begin with it; a group id cannot, for it is not printable."""

ReadyKey = tuple[int, int]
"""Oldest version, sequence of the first group."""


def parcel_name(sequence: int) -> str:
    """What the record of the parcel whose first group is number `sequence` is called among a run's records."""
    return f"{_MARK}{sequence}"


def is_parcel(name: str) -> bool:
    """Whether a record's name is a parcel's; else it is a group id."""
    return name.startswith(_MARK)


def slice_of(parcel: ParcelRecord) -> PayloadSlice:
    """Where a parcel's groups are."""
    start = parcel.payload_start
    return PayloadSlice(payload_id=parcel.payload_id, start=start, end=start + sum(parcel.group_bytes))


def by_group(parcel: ParcelRecord, values: Sequence[int], reduce: Callable[[Sequence[int]], int]) -> list[int]:
    """Values of samples reduced to one a group."""
    ends = accumulate(parcel.num_samples)
    return [reduce(values[end - count : end]) for end, count in zip(ends, parcel.num_samples, strict=True)]


@dataclass(slots=True, kw_only=True)
class _Entry:
    """What a parcel adds to the queues, so that it can be taken out again."""

    oldest: int
    num_groups: int
    num_samples: int
    size_bytes: int
    trained_version: int | None
    is_delivered: bool


class ParcelShelf:
    """See the module. Fields are read freely by the operations; RunState alone calls `index` and `unindex`."""

    def __init__(self) -> None:
        self.records: dict[str, ParcelRecord] = {}
        self.name_of: dict[str, str] = {}
        """Parcel by group id."""
        self.ready: SortedList[ReadyKey] = SortedList()
        self.delivered: set[str] = set()
        self.trained: dict[int, set[str]] = {}
        self.num_samples: Counter[broker_pb2.SampleState.ValueType] = Counter()
        """Live samples by state."""
        self.num_groups: Counter[broker_pb2.SampleState.ValueType] = Counter()
        """Live groups by state of their samples."""
        self.num_ready_by_version: Counter[int] = Counter()
        """Groups that wait for the trainer, by the oldest version of their parcel."""
        self._num_delivered_by_version: Counter[int] = Counter()
        """Delivered parcels by their oldest version."""
        self.waiting_bytes = 0
        """Payload that waits for the trainer."""
        self.trained_bytes: Counter[int] = Counter()
        """Retained payload by the step that trained it."""
        self._num_uses: Counter[str] = Counter()
        self._entries: dict[str, _Entry] = {}

    @property
    def num_live_groups(self) -> int:
        """Groups that are neither trained nor dropped."""
        return self.num_groups[_SCORED] + self.num_groups[_DELIVERED]

    def is_used(self, payload_id: str) -> bool:
        """Whether any parcel has a part of the payload."""
        return self._num_uses[payload_id] > 0

    def names(self, group_ids: Iterable[str]) -> dict[str, list[str]]:
        """Those of the groups that are in parcels, by parcel."""
        found: dict[str, list[str]] = {}
        for group_id in group_ids:
            name = self.name_of.get(group_id)
            if name is not None:
                found.setdefault(name, []).append(group_id)
        return found

    def live(self) -> Iterator[tuple[str, ParcelRecord]]:
        """Parcels that are neither trained nor dropped."""
        return ((name, record) for name, record in self.records.items() if not record.HasField("trained_version"))

    def first_ready(self, num_groups: int) -> list[str]:
        """The parcels that wait longest for the trainer, with `num_groups` groups or more: oldest version first."""
        found: list[str] = []
        for _oldest, sequence in self.ready:
            if num_groups <= 0:
                break
            found.append(parcel_name(sequence))
            num_groups -= len(self.records[found[-1]].group_ids)
        return found

    def oldest_version(self, name: str) -> int:
        """The oldest policy version among a parcel's samples."""
        return self._entries[name].oldest

    def older_than(self, version: int) -> list[str]:
        """Live parcels with samples of an older version."""
        ready = [parcel_name(sequence) for _oldest, sequence in takewhile(lambda key: key[0] < version, self.ready)]
        if not any(oldest < version for oldest in self._num_delivered_by_version):
            # As nearly always: asked with every delivery, while a whole step may be in the trainer's hands.
            return ready
        return ready + [name for name in self.delivered if self.oldest_version(name) < version]

    def add(self, name: str, record: ParcelRecord) -> None:
        """Take a parcel in, or another record of the same name in its place."""
        self.remove(name)
        self.records[name] = record
        self._num_uses[record.payload_id] += 1
        self.name_of.update(dict.fromkeys(record.group_ids, name))
        self.index(name)

    def remove(self, name: str) -> None:
        """Forget a parcel, if it is there."""
        record = self.records.get(name)
        if record is None:
            return
        self.unindex(name)
        del self.records[name]
        self._num_uses[record.payload_id] -= 1
        if not self._num_uses[record.payload_id]:
            del self._num_uses[record.payload_id]
        for group_id in record.group_ids:
            if self.name_of.get(group_id) == name:
                del self.name_of[group_id]

    def index(self, name: str) -> None:
        """Enter a parcel into the queues."""
        record = self.records[name]
        entry = self._entries[name] = _Entry(
            oldest=min(record.sample_min_versions),
            num_groups=len(record.group_ids),
            num_samples=len(record.sample_tokens),
            size_bytes=sum(record.group_bytes),
            trained_version=record.trained_version if record.HasField("trained_version") else None,
            is_delivered=bool(record.consumer_id),
        )
        if entry.trained_version is not None:
            self.trained.setdefault(entry.trained_version, set()).add(name)
        elif entry.is_delivered:
            self.delivered.add(name)
        else:
            self.ready.add((entry.oldest, record.sequence))
        self._count(entry, 1)

    def unindex(self, name: str) -> None:
        """Take a parcel out of the queues."""
        entry = self._entries.pop(name)
        if entry.trained_version is not None:
            trained = self.trained[entry.trained_version]
            trained.discard(name)
            if not trained:
                del self.trained[entry.trained_version]
        elif entry.is_delivered:
            self.delivered.discard(name)
        else:
            self.ready.discard((entry.oldest, self.records[name].sequence))
        self._count(entry, -1)

    def _count(self, entry: _Entry, sign: int) -> None:
        if entry.trained_version is not None:
            _add(self.trained_bytes, entry.trained_version, sign * entry.size_bytes)
            return
        state = _DELIVERED if entry.is_delivered else _SCORED
        self.num_samples[state] += sign * entry.num_samples
        self.num_groups[state] += sign * entry.num_groups
        if entry.is_delivered:
            _add(self._num_delivered_by_version, entry.oldest, sign)
        else:
            _add(self.num_ready_by_version, entry.oldest, sign * entry.num_groups)
            self.waiting_bytes += sign * entry.size_bytes


def _add(counter: Counter[int], key: int, amount: int) -> None:
    """Count; a key at zero goes, so that the counter stays small."""
    counter[key] += amount
    if not counter[key]:
        del counter[key]
