"""Stores the records of a run's groups; those of groups that were submitted and trained are kept as bytes.

They are most of a run that retains steps, and are rarely read: by exports, rewinds and repeated acknowledgements.
As bytes they need no parsing when a run is loaded, a third of the memory, and no garbage collection.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from services.broker.records_pb2 import GroupRecord
from services.broker.state.batches import head_of


class GroupRecords(Mapping[str, GroupRecord]):
    """Records by name. Reading a packed one returns a copy; only `RunState` changes anything here."""

    def __init__(self) -> None:
        self._open: dict[str, GroupRecord] = {}
        self._packed: dict[str, bytes] = {}
        self._at: dict[int, str] = {}
        """Group by sequence."""

    def __getitem__(self, group_id: str) -> GroupRecord:
        group = self._open.get(group_id)
        return GroupRecord.FromString(self._packed[group_id]) if group is None else group

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._open or group_id in self._packed

    def __iter__(self) -> Iterator[str]:
        return chain(self._open, self._packed)

    def __len__(self) -> int:
        return len(self._open) + len(self._packed)

    def is_open(self, name: str) -> bool:
        """Whether a record is present and not packed."""
        return name in self._open

    def has_any(self, group_ids: Collection[str]) -> bool:
        """Whether any of the groups is present."""
        return not (self._open.keys().isdisjoint(group_ids) and self._packed.keys().isdisjoint(group_ids))

    def at(self, sequence: int) -> GroupRecord | None:
        """The group submitted as number `sequence`."""
        group_id = self._at.get(sequence)
        return None if group_id is None else self[group_id]

    def sequence(self, group_id: str) -> int:
        """The number of a group's submission."""
        group = self._open.get(group_id)
        return head_of(self._packed[group_id]).sequence if group is None else group.sequence

    def serialized(self, group_id: str) -> bytes:
        """A group's record as the store has it, or will have it."""
        group = self._open.get(group_id)
        return self._packed[group_id] if group is None else group.SerializeToString()

    def put(self, group: GroupRecord) -> None:
        """Add a group."""
        self._open[group.group_id] = group
        self._at[group.sequence] = group.group_id

    def add_packed(self, group_id: str, record: bytes, sequence: int) -> None:
        """Add a group as bytes."""
        self._packed[group_id] = record
        self._at[sequence] = group_id

    def pack(self, group_id: str, record: bytes) -> None:
        """Turn a group into bytes: its record will not change for a long time."""
        if self._open.pop(group_id, None) is not None:
            self._packed[group_id] = record

    def opened(self, group_id: str) -> GroupRecord:
        """A group's record itself, to be changed."""
        if group_id not in self._open:
            self._open[group_id] = GroupRecord.FromString(self._packed.pop(group_id))
        return self._open[group_id]

    def remove(self, group_id: str) -> None:
        """Forget a group, if present."""
        if group_id in self:
            self._at.pop(self.sequence(group_id), None)
            self._open.pop(group_id, None)
            self._packed.pop(group_id, None)
