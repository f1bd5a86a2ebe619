"""Holds a run in memory: its records, the queues derived from them, and the changes since the last commit.

Pure: no clock, no I/O. Every change of a group happens inside `edit`, which keeps the queues in sync with the records
and remembers how to undo it. After each operation the caller calls `keep`, or `undo` if it failed; after any number
of operations it takes the `delta`, commits it, and calls either `settle` (stored) or `rollback` (not stored).

Invariants: the queues and the index are a function of the records; a record is live until it is trained or retired; the
counters of the run change together with the records they count. Trained groups are in no queue: loading reads only the
heads of the records of those that were submitted, which are most of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from sortedcontainers import SortedList

from penstock.errors import RunClosedError
from services.broker.dispatch.situation import Order, Rank
from services.broker.records.formats import check_format
from services.broker.records.store import Delta, SampleId, Snapshot
from services.broker.records_pb2 import GroupRecord, RenewalRecord, RunRecord, SampleRecord, SessionRecord, StepTally
from services.broker.rules.admission import AdmissionRule
from services.broker.rules.limits import Limits
from services.broker.rules.sample_policy import Policy
from services.broker.state import other_records
from services.broker.state.batch_index import BatchIndex
from services.broker.state.batches import cut_at, cuts_between, head_of, ids, num_groups, read_record
from services.broker.state.group_records import GroupRecords
from services.broker.state.lease_ends import LeaseEnds
from services.broker.state.news import News
from services.broker.state.run_queues import RunQueues

FORMAT = 6
"""Format version of the records that this code writes; it reads all older ones. 2: see `ParcelRecord`. 3: see
`CompactSample`. 4: see `RenewalRecord`. 5: see `reference_element`. 6: see `SessionRecord`."""
SLICE_BYTES = 128 * 1024
"""Records applied at once while a run is loaded: about 10 ms if all are live."""


class RunState:
    """See the module. Operations may read all fields; only this class writes them."""

    def __init__(self) -> None:
        self._undo: dict[str, bytes | None] = {}
        """Records changed by the current operation, as they were before it; None if absent."""
        self._kept_undo: dict[str, bytes | None] = {}
        """Records changed since the last commit, as they were then."""
        self._stored: dict[str, bytes]
        """Records of groups under way that grew, as of the last commit: the next growth needs no copy to undo it."""
        self._grown: set[str]
        """Records that grew since the last commit."""
        self.pending: Delta
        """Changes of the current operation other than records."""
        self._kept: Delta
        self._is_turned = False
        """Whether a record changed since the last commit beyond what `grow` allows."""
        self.num_changes = 0
        """Counts changes of records beyond growth; tells a caller whether anything changed."""
        self.known_retired: set[str] = set()
        """Ids that the store refused because their groups are retired; see `Delta.fresh`."""
        self._reset(RunRecord())

    def _reset(self, run: RunRecord) -> None:
        self.run = run
        self.groups = GroupRecords()
        self.index = BatchIndex()
        self._queues = RunQueues()
        self.queued_lengths, self.leased_lengths = self._queues.queued_lengths, self._queues.leased_lengths
        self.finished, self.sealing = self._queues.finished, self._queues.sealing
        self.generation_leases, self.scoring_leases = self._queues.generation_leases, self._queues.scoring_leases
        self.generation_ends, self.scoring_ends = LeaseEnds(), LeaseEnds()
        self._others = other_records.OtherRecords()
        self.tallies = self._others.tallies
        """By step: the tally of its groups that no longer have a record."""
        self.renewals = self._others.renewals
        """By generator: the last renewal of its leases."""
        self.sessions = self._others.sessions
        """By id: agents' sessions."""
        self._stored = {}
        self._forget(run.SerializeToString(deterministic=True))

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def queue(self) -> SortedList[Rank]:
        """Groups with samples to lease, in order of arrival; a rank ends with the group's sequence."""
        return self._queues.queued_in(Order.ARRIVAL)

    def queued_in(self, order: Order) -> SortedList[Rank]:
        """The queue in an order; by arrival if the run keeps no other."""
        return self._queues.queued_in(order)

    def check_open(self) -> None:
        """Raise RunClosedError if the run is closed."""
        if self.run.is_closed:
            raise RunClosedError(f"run {self.run.run_id!r} is closed", run_id=self.run.run_id)

    def knows(self, group_id: str) -> bool:
        """Whether the id is used: its group is in the run, or was."""
        return group_id in self.groups or group_id in self.index.record_of or group_id in self.known_retired

    def knows_any(self, group_ids: Collection[str]) -> bool:
        """Whether any of the ids is used."""
        return not (
            not self.groups.has_any(group_ids)
            and self.index.record_of.keys().isdisjoint(group_ids)
            and self.known_retired.isdisjoint(group_ids)
        )

    def records_of(self, group_ids: Iterable[str]) -> dict[str, list[str]]:
        """The groups among these that the run has, by the name of their record."""
        found: dict[str, list[str]] = {}
        for group_id in group_ids:
            name = self.index.record_of.get(group_id, group_id)
            if name in self.groups:
                found.setdefault(name, []).append(group_id)
        return found

    def trained_ids(self, version: int) -> set[str]:
        """The groups of a retained step."""
        return {group_id for name in self.index.trained.get(version, ()) for group_id in ids(self.groups[name])}

    def admission(self) -> AdmissionRule:
        """The current admission rule."""
        return AdmissionRule(
            limits=self.limits,
            policy=self.policy,
            policy_version=self.run.policy_version,
            num_started=self.index.num_started,
            is_full=self.index.live_bytes >= self.policy.max_live_bytes,
        )

    def num_waiting(self, purpose: int) -> int:
        """Groups of a purpose none of whose samples was ever leased."""
        return self._queues.num_waiting(purpose)

    def take_news(self) -> News:
        """What changed since the last call, whether it was committed, undone or taken over."""
        return self._queues.take_news()

    def lease_end_s(self, sample: SampleRecord) -> float:
        """When the lease ends under which a generator holds a sample."""
        renewal = self.renewals.get(sample.generator_id)
        if renewal is None or sample.lease_s > renewal.renewed_s:
            return sample.lease_expire_s
        renewed_end_s = max(sample.lease_expire_s, renewal.renewed_s + self.limits.generation_lease_s)
        return renewal.other_ends_s.get(sample.lease_id, renewed_end_s)

    def num_held(self, purpose: int) -> tuple[int, int]:
        """Groups of a purpose of which a generator holds a sample; and others of which one waits for its score."""
        return self._queues.num_held(purpose)

    # -- changing ------------------------------------------------------------------------------------------------------

    def create(self, run: RunRecord) -> None:
        """Start an empty run."""
        self._reset(run)
        self._run_committed = b""
        self._read_limits()

    def add(self, record: GroupRecord, prompt: bytes | None = None) -> None:
        """Add a new record, with the prompt of a group that was submitted."""
        self._is_turned = True
        self._undo.setdefault(record.group_id, None)
        if prompt is None:
            self.run.format = FORMAT
        else:
            self.pending.prompts[record.group_id] = prompt
        self._take_in(record)

    @contextmanager
    def edit(self, group_id: str) -> Iterator[GroupRecord]:
        """A record, to be changed inside the block; the columns of a put are not changed."""
        self._is_turned = True
        group = self._noted(group_id)
        self._unindex(group_id)
        try:
            yield group
        finally:
            if group_id in self.groups:
                self._index(group)

    def grow(self, group_id: str) -> None:
        """Allow adding tokens and versions of the group's leased samples, but nothing else.

        Cheaper than `edit`, for the most frequent change: no queue is updated. Report a sample that gets an
        older version by `lower_version`.
        """
        self._noted(group_id)
        self._grown.add(group_id)

    def lower_version(self, group_id: str, version: int) -> None:
        """Note that a sample of the group has tokens of `version`. Not needed in an `edit`, where it does nothing."""
        self.index.lower_version(group_id, version)

    def carve(self, name: str, wanted: Collection[str]) -> list[str]:
        """Split a record where wanted groups meet others; returns the names of the wanted ones' records."""
        record, wanted = self.groups[name], frozenset(wanted)
        cuts = cuts_between(record, wanted)
        if not cuts:
            return [name] if ids(record)[0] in wanted else []
        self._is_turned = True
        self._noted(name)
        self._take_out(name)
        pieces = cut_at(record, [0, *cuts, num_groups(record)])
        for piece in pieces:
            self._undo.setdefault(piece.group_id, None)
            self._take_in(piece)
        return [piece.group_id for piece in pieces if piece.put.group_ids[0] in wanted]

    def set_tally(self, version: int, tally: StepTally | None) -> None:
        """Replace a step's tally, or remove it with None."""
        self._is_turned = True
        name = other_records.tally_name(version)
        self._undo.setdefault(name, self._serialized(name))
        other_records.put_or_remove(self.tallies, version, tally)

    def set_renewal(self, holder_id: str, renewal: RenewalRecord | None) -> None:
        """Replace the renewal of a generator's leases, or remove it with None; no stream waits for that."""
        name = other_records.renewal_name(holder_id)
        self._undo.setdefault(name, self._serialized(name))
        self.run.format = FORMAT
        other_records.put_or_remove(self.renewals, holder_id, renewal)

    def set_session(self, session_id: str, session: SessionRecord | None) -> None:
        """Replace an agent's session, or remove it and its turns with None."""
        name = other_records.session_name(session_id)
        self._undo.setdefault(name, self._serialized(name))
        self.run.format = FORMAT
        self.sessions.put(session_id, session)
        if session is None:
            self.clear((name, 0))

    def _noted(self, group_id: str) -> GroupRecord:
        """The group, before its record changes."""
        if group_id not in self._undo:
            stored = None if group_id in self._kept_undo else self._stored.get(group_id)
            self._undo[group_id] = stored or self.groups.serialized(group_id)
        if self.index.is_put(group_id):
            self.run.format = FORMAT
        return self.groups.opened(group_id)

    def append(self, sample: SampleId, chunk: bytes) -> None:
        """Store a chunk with the next commit."""
        self.pending.chunks.append((sample, chunk))

    def clear(self, sample: SampleId) -> None:
        """Delete a sample's chunks with the next commit, those not yet committed too."""
        self.pending.cleared.add(sample)
        self.pending.chunks = [item for item in self.pending.chunks if item[0] != sample]

    def retire(self, name: str) -> None:
        """Forget a record and its payload (a put's payload with its last record); never accept its ids again."""
        self._is_turned = True
        record = self._noted(name)
        self._take_out(name)
        self.pending.retired.update(ids(record))
        if record.HasField("put"):
            self.pending.dropped_payloads.add(record.put.payload_id)
            return
        self.pending.prompts[name] = None
        for index in range(len(record.samples)):
            self.clear((name, index))

    # -- committing ----------------------------------------------------------------------------------------------------

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to commit."""
        return (
            bool(self._undo or self._kept_undo) or self.run.SerializeToString(deterministic=True) != self._run_committed
        )

    @property
    def only_grew(self) -> bool:
        """Whether the delta only adds tokens to samples that are still under way, or renews leases."""
        return not self._is_turned and self._run_kept == self._run_committed

    def keep(self) -> None:
        """Keep the current operation: its changes become part of the next delta."""
        self._run_kept = self.run.SerializeToString(deterministic=True)
        for name, record in self._undo.items():
            self._kept_undo.setdefault(name, record)
        self._kept.absorb(self.pending)
        self._undo, self.pending = {}, Delta(run=b"")

    def undo(self) -> None:
        """Undo the current operation, which failed: back to the last one kept."""
        self._restore(self._undo, self._run_kept)
        self._undo, self.pending = {}, Delta(run=b"")

    def delta(self) -> Delta:
        """All changes since the last commit."""
        self.keep()
        self._kept.run = self._run_kept
        for name in self._kept_undo:
            self._kept.groups[name] = self._serialized(name)
        self._kept.keep_payloads(self.index.is_used)
        return self._kept

    def _serialized(self, name: str) -> bytes | None:
        """The current record of this name; None if there is none."""
        if not other_records.is_group(name):
            return self._others.serialized(name)
        return self.groups.serialized(name) if name in self.groups else None

    def settle(self) -> None:
        """Drop the undo data: the delta is stored."""
        self.keep()
        for name, record in self._kept.groups.items():
            if record is not None and self.index.is_trained(name) and not self.index.is_put(name):
                self.groups.pack(name, record)
            if record is not None and name in self._grown:
                self._stored[name] = record
            else:
                self._stored.pop(name, None)
        self._run_committed = self._run_kept
        self._kept_undo, self._kept, self._grown, self._is_turned = {}, Delta(run=b""), set(), False
        self.known_retired.clear()

    def rollback(self) -> None:
        """Return to the last commit: the delta was not stored."""
        self._restore(self._undo | self._kept_undo, self._run_committed)
        self._forget(self._run_committed)

    def take_over(self, snapshot: Snapshot) -> Iterator[None]:
        """Apply the store's contents slice by slice, with nothing pending; the copy is complete only after the last.

        Between slices each record is either the old or the new one. Raises ServiceUnavailableError before the first.
        """
        run = RunRecord.FromString(snapshot.run)
        check_format(f"run {run.run_id!r}", run_id=run.run_id, stored=run.format, reads=FORMAT)
        if snapshot.is_full or run.payload_gone:
            self._reset(run)
        self.run = run
        self._read_limits()
        # Records that are being deleted no longer count.
        num_bytes = 0
        for name, record in ({} if run.payload_gone else snapshot.groups).items():
            if snapshot.is_full and record is not None:
                # Nothing is there to be replaced: half of the time for trained records.
                self._read_in(name, record)
            else:
                self._replace(name, record)
            num_bytes += len(name) + len(record or b"")
            if num_bytes >= SLICE_BYTES:
                num_bytes = 0
                yield
        self._forget(run.SerializeToString(deterministic=True))

    def _restore(self, undo: Mapping[str, bytes | None], run: bytes) -> None:
        for name, record in undo.items():
            self._replace(name, record)
        self.run = RunRecord.FromString(run)
        self._read_limits()
        self.generation_ends.forget()
        self.scoring_ends.forget()

    def _forget(self, run: bytes) -> None:
        self._undo, self._kept_undo, self._grown, self._is_turned = {}, {}, set(), False
        self.pending, self._kept = Delta(run=b""), Delta(run=b"")
        self._run_kept = self._run_committed = run

    def _read_limits(self) -> None:
        if self.run.HasField("limits"):
            self.limits = Limits.from_proto(self.run.limits)
            self.policy = Policy.from_proto(self.run.policy, self.limits)

    def _replace(self, name: str, data: bytes | None) -> None:
        if not other_records.is_group(name):
            self._others.replace(name, data)
            return
        self._take_out(name)
        if data is not None:
            self._read_in(name, data)

    def _read_in(self, name: str, data: bytes) -> None:
        """Add a stored record where there is none of its name."""
        if not other_records.is_group(name):
            self._others.replace(name, data)
            return
        head = head_of(data)
        if head.HasField("trained_version") and not head.HasField("put"):
            self.groups.add_packed(name, data, head.sequence)
            self.index.add_trained(name, head.trained_version, head.stored_bytes)
        else:
            self._take_in(read_record(name, data, head))

    def _take_in(self, record: GroupRecord) -> None:
        self.groups.put(record)
        self.index.enter(record)
        self._index(record)

    def _take_out(self, name: str) -> None:
        """Forget a record, if present."""
        self._stored.pop(name, None)
        self._unindex(name)
        if self.groups.is_open(name):
            self.index.leave(self.groups[name])
        self.index.forget(name)
        self.groups.remove(name)

    def _index(self, group: GroupRecord) -> None:
        self.num_changes += 1
        if not self.index.add(group):
            return
        self._queues.add(
            group,
            is_started=self.index.is_started(group.group_id),
            by_length_of=self.limits.groups_per_step if self.policy.dispatches_by_length else None,
        )

    def _unindex(self, name: str) -> None:
        self.num_changes += 1
        self.index.remove(name)
        self._queues.remove(name)
