"""The records of a run's groups; those of groups that were submitted and trained rest as bytes.

They are most of a run that retains steps, and hardly anything reads them: exports, rewinds, repeated acknowledgements.
As bytes they cost no parsing when a run is loaded, a third of the memory, and no work of the garbage collector.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from services.broker.records_pb2 import GroupRecord
from services.broker.state.batches import head_of


class GroupRecords(Mapping[str, GroupRecord]):
    """Records by name. What is read of a packed one is a copy; only `RunState` changes anything here."""

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
        """Whether a record is here and not packed."""
        return name in self._open

    def has_any(self, group_ids: Collection[str]) -> bool:
        """Whether any of the groups is here."""
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
        """A group's record as the store has it, or will."""
        group = self._open.get(group_id)
        return self._packed[group_id] if group is None else group.SerializeToString()

    def put(self, group: GroupRecord) -> None:
        """Take a group in."""
        self._open[group.group_id] = group
        self._at[group.sequence] = group.group_id

    def pack(self, group_id: str, record: bytes) -> None:
        """Take a group in, or put one aside that is here, whose record is not going to change for long."""
        group = self._open.pop(group_id, None)
        self._packed[group_id] = record
        if group is None:
            self._at[head_of(record).sequence] = group_id

    def opened(self, group_id: str) -> GroupRecord:
        """A group's record itself, to be changed."""
        if group_id not in self._open:
            self._open[group_id] = GroupRecord.FromString(self._packed.pop(group_id))
        return self._open[group_id]

    def remove(self, group_id: str) -> None:
        """Forget a group, if it is here."""
        if group_id in self:
            self._at.pop(self.sequence(group_id), None)
            self._open.pop(group_id, None)
            self._packed.pop(group_id, None)
