"""Holds a token shard in memory: what it has of each sample under way, and the changes since the last commit.

Pure, and used like `RunState`: operations change it, then `keep` or `undo`; later `delta`, then `settle` or `rollback`.

Invariant: a tail's `num_tokens` are the tokens in the sample's list of chunks. A group whose samples have all ended, as
the run knows, is *at rest* until the run has no more use for it: it is kept as bytes, without what only its last chunks
needed, but with its leases' order, so that late messages do not restart it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.v1 import types_pb2
from services.broker.records.formats import check_format
from services.broker.records.store import Delta, SampleId, Snapshot
from services.broker.records_pb2 import SampleTail, ShardGroup, ShardRecord

FORMAT = 1
"""Format version of the records that this code writes."""
SLICE_BYTES = 128 * 1024
"""Records applied at once while a shard is loaded."""
_COMPLETE = frozenset((types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH))


class ShardState:
    """See the module. Operations may read all fields, and change a group after `edit`."""

    def __init__(self) -> None:
        self._undo: dict[str, bytes | None] = {}
        """Records changed by the current operation, as they were before it; None if absent."""
        self._kept_undo: dict[str, bytes | None] = {}
        """Records changed since the last commit, as they were then."""
        self.pending = Delta(run=b"")
        """Changes of the current operation other than records."""
        self._kept = Delta(run=b"")
        self._is_new = False
        self._reset()

    def _reset(self) -> None:
        self.shard = ShardRecord()
        self.groups: dict[str, ShardGroup] = {}
        """Groups that are not at rest."""
        self.at_rest: dict[str, bytes] = {}
        """The records of groups at rest."""
        self.ended: set[SampleId] = set()
        """Samples whose end the run has not confirmed."""
        self.grown: set[SampleId] = set()
        """Samples that grew since they were last reported to the run."""

    # -- reading -------------------------------------------------------------------------------------------------------

    def tail(self, sample: SampleId) -> SampleTail | None:
        """What is known of a sample, to be read only; None if nothing."""
        group = self.groups.get(sample[0])
        if group is None and sample[0] in self.at_rest:
            group = ShardGroup.FromString(self.at_rest[sample[0]])
        return None if group is None else group.tails.get(sample[1])

    def knows(self, group_id: str) -> bool:
        """Whether the group has, or had, chunks here."""
        return group_id in self.groups or group_id in self.at_rest

    @property
    def is_empty(self) -> bool:
        """Whether no group has a record."""
        return not (self.groups or self.at_rest)

    @property
    def group_ids(self) -> list[str]:
        """Every group with a record."""
        return [*self.groups, *self.at_rest]

    # -- changing ------------------------------------------------------------------------------------------------------

    def create(self, shard: ShardRecord) -> None:
        """Start an empty shard."""
        self.shard, self._is_new = shard, True
        self.shard.format = FORMAT

    def grow(self, group_id: str) -> None:
        """Allow changing the tails that the group has by the current operation."""
        if group_id not in self._undo:
            self._undo[group_id] = self._serialized(group_id)

    def edit(self, sample: SampleId) -> ShardGroup:
        """The group of a sample, a new one if need be, to be changed by the current operation."""
        group_id, index = sample
        self.grow(group_id)
        group = self.groups.get(group_id)
        if group is None:
            group = ShardGroup.FromString(self.at_rest.pop(group_id, b""))
            group.group_id = group_id
            self.groups[group_id] = group
        if index >= group.num_samples:
            group.num_samples = index + 1
        return group

    def append(self, sample: SampleId, chunk: bytes) -> None:
        """Store a chunk with the next commit."""
        self.pending.chunks.append((sample, chunk))

    def clear(self, sample: SampleId) -> None:
        """Delete a sample's chunks with the next commit, those not yet committed too."""
        self.pending.cleared.add(sample)
        self.pending.chunks = [item for item in self.pending.chunks if item[0] != sample]

    def rest(self, group_id: str) -> None:
        """Put a group to rest if its samples have all ended and the run knows; after an `edit`."""
        group = self.groups[group_id]
        if not _may_rest(group):
            return
        for tail in group.tails.values():
            tail.lease_id = tail.lease_id.rpartition(".")[0]
            tail.ClearField("generator_id")
            tail.ClearField("last_chunk_s")
            tail.ClearField("score")
        self.at_rest[group_id] = group.SerializeToString()
        del self.groups[group_id]

    def remove(self, group_id: str) -> None:
        """Forget a group and its chunks."""
        record = self._serialized(group_id)
        self._undo.setdefault(group_id, record)
        for index in range(ShardGroup.FromString(record or b"").num_samples):
            self.clear((group_id, index))
        self._take_out(group_id)

    # -- committing ----------------------------------------------------------------------------------------------------

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self._undo or self._kept_undo or self._is_new)

    @property
    def only_grew(self) -> bool:
        """Nothing listens to a shard."""
        return True

    def keep(self) -> None:
        """Keep the current operation: its changes become part of the next delta."""
        for name, record in self._undo.items():
            self._kept_undo.setdefault(name, record)
        self._kept.absorb(self.pending)
        self._undo, self.pending = {}, Delta(run=b"")

    def undo(self) -> None:
        """Undo the current operation, which failed."""
        for name, record in self._undo.items():
            self._replace(name, record)
        self._undo, self.pending = {}, Delta(run=b"")

    def delta(self) -> Delta:
        """All changes since the last commit."""
        self.keep()
        self._kept.run = self.shard.SerializeToString(deterministic=True)
        for name in self._kept_undo:
            self._kept.groups[name] = self._serialized(name)
        return self._kept

    def settle(self) -> None:
        """The delta is stored."""
        self._forget()

    def rollback(self) -> None:
        """Return to the last commit: the delta was not stored."""
        for name, record in (self._undo | self._kept_undo).items():
            self._replace(name, record)
        self._forget()

    def take_over(self, snapshot: Snapshot) -> Iterator[None]:
        """Apply the store's contents slice by slice, with nothing pending.

        Raises ServiceUnavailableError before the first.
        """
        shard = ShardRecord.FromString(snapshot.run)
        what = f"a token shard of run {shard.run_id!r}"
        check_format(what, run_id=shard.run_id, stored=shard.format, reads=FORMAT)
        if snapshot.is_full:
            self._reset()
        self.shard = shard
        num_bytes = 0
        for name, record in snapshot.groups.items():
            self._replace(name, record)
            num_bytes += len(name) + len(record or b"")
            if num_bytes >= SLICE_BYTES:
                num_bytes = 0
                yield
        self._forget()

    def _forget(self) -> None:
        self._undo, self._kept_undo, self._is_new = {}, {}, False
        self.pending, self._kept = Delta(run=b""), Delta(run=b"")

    def _serialized(self, group_id: str) -> bytes | None:
        group = self.groups.get(group_id)
        return self.at_rest.get(group_id) if group is None else group.SerializeToString()

    def _replace(self, name: str, data: bytes | None) -> None:
        self._take_out(name)
        if data is None:
            return
        group = ShardGroup.FromString(data)
        if _may_rest(group):
            self.at_rest[name] = data
            return
        self.groups[name] = group
        self.ended.update((name, index) for index, tail in group.tails.items() if is_unreported(tail))

    def _take_out(self, name: str) -> None:
        self.at_rest.pop(name, None)
        group = self.groups.pop(name, None)
        if group is not None:
            self.ended.difference_update([(name, index) for index in group.tails])


def _may_rest(group: ShardGroup) -> bool:
    return all(tail.is_reported and is_complete(tail) for tail in group.tails.values())


def is_complete(tail: SampleTail) -> bool:
    """Whether a sample has ended by itself."""
    return tail.finish_reason in _COMPLETE


def is_unreported(tail: SampleTail) -> bool:
    """Whether the run has yet to confirm a sample's end."""
    return bool(tail.finish_reason) and not tail.is_reported


def copied(tail: SampleTail) -> SampleTail:
    """A copy, which later changes of the shard leave alone."""
    copy = SampleTail()
    copy.CopyFrom(tail)
    return copy
