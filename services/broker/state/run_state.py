"""A run in memory: its records, the queues derived from them, and what changed since the last commit.

Pure: no clock, no I/O. Every change of a group happens inside `edit`, which keeps the queues in step with the records
and remembers how to undo it. After each operation the owner calls `keep`, or `undo` where it failed; after any number
of operations it takes the `delta`, commits it, and calls either `settle` (stored) or `rollback` (not stored).

Invariants: the queues are a function of the records; a group is live until it is trained or retired; the counters of
the run change together with the records they count. Trained groups are in no queue: of their records, which are most of
a run, loading reads no more than the heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from penstock.errors import RunConflictError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.length_histogram import LengthCounts
from services.broker.dispatch.situation import Order, QueuedGroup, Rank
from services.broker.records.store import Delta, SampleId, Snapshot
from services.broker.records_pb2 import GroupRecord, ParcelRecord, RunRecord, SampleRecord, StepTally
from services.broker.rules.admission import AdmissionRule
from services.broker.rules.limits import Limits
from services.broker.rules.sample_policy import Policy
from services.broker.rules.staleness import group_version
from services.broker.state.batch_index import ParcelShelf, is_parcel, parcel_name
from services.broker.state.group_records import GroupRecords, head_of
from services.broker.state.tally_names import is_tally, tally_name, tally_version

_QUEUED, _LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
_FINISHED, _SCORING = broker_pb2.SAMPLE_STATE_FINISHED, broker_pb2.SAMPLE_STATE_SCORING
_READY_STATES = frozenset((broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DROPPED))

FORMAT = 1
"""Version of the records that this code writes; it reads those of every older one."""
Leases = dict[str, dict[str, SampleId]]
"""Sample by lease id, by holder."""
SLICE_BYTES = 128 * 1024
"""Records taken over at once while a run is loaded: about 10 ms where all are live."""
FinishedKey = tuple[int, int, int]
"""0 for evaluation or 1, sequence of the group, sample index."""


@dataclass(slots=True)
class _Entry:
    """Where a group stands in the queues, so that it can be taken out again."""

    ranks: dict[Order, Rank] = field(default_factory=dict)
    queued_length: float = 0.0
    num_queued: int = 0
    finished: list[FinishedKey] = field(default_factory=list)
    generation: list[tuple[str, str]] = field(default_factory=list)
    scoring: list[tuple[str, str]] = field(default_factory=list)
    states: Counter[broker_pb2.SampleState.ValueType] = field(default_factory=Counter)


class RunState:
    """See the module. Fields are read freely by the operations; only this class writes them."""

    def __init__(self) -> None:
        self._undo: dict[str, bytes | None] = {}
        """What the operation under way changed, as it was before it; None where there was nothing."""
        self._kept_undo: dict[str, bytes | None] = {}
        """What the operations since the last commit changed, as it was then."""
        self.pending: Delta
        """What the operation under way does beside the records."""
        self._kept: Delta
        self._is_turned = False
        """Whether a record changed since the last commit in more than what `grow` allows."""
        self.known_retired: set[str] = set()
        """Ids that the store refused because their groups are retired; see `Delta.fresh`."""
        self._reset(RunRecord())

    def _reset(self, run: RunRecord) -> None:
        self.run = run
        self.groups = GroupRecords()
        self.shelf = ParcelShelf()
        self.live: set[str] = set()
        self.queues: dict[Order, SortedList[Rank]] = {order: SortedList() for order in Order}
        self.queued_lengths = LengthCounts()
        """Forecast lengths of the queued samples."""
        self.finished: SortedList[FinishedKey] = SortedList()
        self.generation_leases: Leases = {}
        self.scoring_leases: Leases = {}
        self.ready: dict[int, set[str]] = {types_pb2.PURPOSE_TRAIN: set(), types_pb2.PURPOSE_EVALUATE: set()}
        self.delivered: dict[int, set[str]] = {
            types_pb2.PURPOSE_TRAIN: set(),
            types_pb2.PURPOSE_EVALUATE: set(),
        }
        self._waiting: dict[int, set[str]] = {types_pb2.PURPOSE_TRAIN: set(), types_pb2.PURPOSE_EVALUATE: set()}
        self.trained: dict[int, set[str]] = {}
        self.tallies: dict[int, StepTally] = {}
        """By step: what is known of its groups that have no record any more."""
        self.num_samples: Counter[broker_pb2.SampleState.ValueType] = Counter()
        """Samples of live training groups by state, as their records say; parcels count their own."""
        self.versions: dict[str, int] = {}
        """Oldest version of each live training group that is started."""
        self._trained_by: dict[str, int] = {}
        """Step by trained group."""
        self._entries: dict[str, _Entry] = {}
        self._forget(run.SerializeToString(deterministic=True))

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def queue(self) -> SortedList[Rank]:
        """Groups with samples to lease, in order of arrival; a rank ends with the group's sequence."""
        return self.queues[Order.ARRIVAL]

    def queued_in(self, order: Order) -> SortedList[Rank]:
        """The queue in an order; by arrival where the run keeps no other."""
        return self.queues[order] if len(self.queues[order]) == len(self.queue) else self.queue

    def knows(self, group_id: str) -> bool:
        """Whether the id is taken: its group is in the run, or was."""
        return group_id in self.groups or group_id in self.shelf.name_of or group_id in self.known_retired

    def knows_any(self, group_ids: Collection[str]) -> bool:
        """Whether any of the ids is taken."""
        return not (
            not self.groups.has_any(group_ids)
            and self.shelf.name_of.keys().isdisjoint(group_ids)
            and self.known_retired.isdisjoint(group_ids)
        )

    @property
    def trained_versions(self) -> set[int]:
        """Steps whose groups are retained."""
        return self.trained.keys() | self.shelf.trained.keys()

    def trained_ids(self, version: int) -> set[str]:
        """The groups of a retained step."""
        parcels = (self.shelf.records[name].group_ids for name in self.shelf.trained.get(version, ()))
        return self.trained.get(version, set()).union(*parcels)

    def admission(self) -> AdmissionRule:
        """The admission rule now."""
        return AdmissionRule(
            limits=self.limits,
            policy=self.policy,
            policy_version=self.run.policy_version,
            num_started=len(self.versions) + self.shelf.num_live_groups,
        )

    def num_waiting(self, purpose: int) -> int:
        """Groups of a purpose of which no sample was ever leased."""
        return len(self._waiting[purpose])

    # -- changing ------------------------------------------------------------------------------------------------------

    def create(self, run: RunRecord) -> None:
        """Begin an empty run."""
        self._reset(run)
        self._run_committed = b""
        self._read_limits()

    def add(self, group: GroupRecord, prompt: bytes) -> None:
        """Take in a new group."""
        self._is_turned = True
        self._undo[group.group_id] = None
        self.groups.put(group)
        self.pending.prompts[group.group_id] = prompt
        self._index(group)

    @contextmanager
    def edit(self, group_id: str) -> Iterator[GroupRecord]:
        """The group's record, to be changed inside the block."""
        self._is_turned = True
        group = self._noted(group_id)
        self._unindex(group_id)
        try:
            yield group
        finally:
            if group_id in self.groups:
                self._index(group)

    def grow(self, group_id: str) -> None:
        """From now on tokens of the group's leased samples may be added to its record, and versions, nothing else.

        Cheaper than `edit`, for what happens most often: no queue has to be looked at. A sample that gets older goes
        to `lower_version`.
        """
        self._noted(group_id)

    def lower_version(self, group_id: str, version: int) -> None:
        """A sample of the group has tokens of `version`. Inside an `edit` it is not needed and does nothing."""
        if version < self.versions.get(group_id, version):
            self.versions[group_id] = version

    def add_parcel(self, record: ParcelRecord) -> str:
        """Take in a parcel, or put another record in the place of the one that begins with the same group."""
        name = parcel_name(record.sequence)
        self._note_parcel(name)
        self.shelf.add(name, record)
        return name

    @contextmanager
    def edit_parcel(self, name: str) -> Iterator[ParcelRecord]:
        """A parcel's record, its state to be changed inside the block; its groups stay."""
        self._note_parcel(name)
        self.shelf.unindex(name)
        try:
            yield self.shelf.records[name]
        finally:
            self.shelf.index(name)

    def retire_parcel(self, name: str) -> None:
        """Forget a parcel, but never accept its ids again; its payload goes with its last parcel."""
        record = self.shelf.records[name]
        self._note_parcel(name)
        self.shelf.remove(name)
        self.pending.dropped_payloads.add(record.payload_id)
        self.pending.retired.update(record.group_ids)

    def set_tally(self, version: int, tally: StepTally | None) -> None:
        """Keep another tally of a step, or none."""
        self._is_turned = True
        name = tally_name(version)
        if name not in self._undo:
            old = self.tallies.get(version)
            self._undo[name] = None if old is None else old.SerializeToString()
        if tally is None:
            self.tallies.pop(version, None)
        else:
            self.tallies[version] = tally

    def _noted(self, group_id: str) -> GroupRecord:
        """The group, whose record is about to change."""
        if group_id not in self._undo:
            self._undo[group_id] = self.groups.serialized(group_id)
        return self.groups.opened(group_id)

    def _note_parcel(self, name: str) -> None:
        self._is_turned = True
        if name not in self._undo:
            record = self.shelf.records.get(name)
            self._undo[name] = None if record is None else record.SerializeToString()

    def append(self, sample: SampleId, chunk: bytes) -> None:
        """Store a chunk with the next commit."""
        self.pending.chunks.append((sample, chunk))

    def clear(self, sample: SampleId) -> None:
        """Delete a sample's chunks with the next commit, those not yet committed too."""
        self.pending.cleared.add(sample)
        self.pending.chunks = [item for item in self.pending.chunks if item[0] != sample]

    def retire(self, group_id: str) -> None:
        """Forget a group and its payload, but never accept its id again."""
        self._is_turned = True
        group = self._noted(group_id)
        self._unindex(group_id)
        self.groups.remove(group_id)
        self.pending.prompts[group_id] = None
        for index in range(len(group.samples)):
            self.clear((group_id, index))
        self.pending.retired.add(group_id)

    # -- committing ----------------------------------------------------------------------------------------------------

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to commit."""
        return (
            bool(self._undo or self._kept_undo) or self.run.SerializeToString(deterministic=True) != self._run_committed
        )

    @property
    def only_grew(self) -> bool:
        """Whether all that the delta changes is tokens of samples that are still under way."""
        return not self._is_turned and self._run_kept == self._run_committed

    def keep(self) -> None:
        """The operation under way is decided: its changes are part of the next delta."""
        self._run_kept = self.run.SerializeToString(deterministic=True)
        for name, record in self._undo.items():
            self._kept_undo.setdefault(name, record)
        self._kept.absorb(self.pending)
        self._undo, self.pending = {}, Delta(run=b"")

    def undo(self) -> None:
        """The operation under way failed: back to where the last one was kept."""
        self._restore(self._undo, self._run_kept)
        self._undo, self.pending = {}, Delta(run=b"")

    def delta(self) -> Delta:
        """Everything changed since the last commit."""
        self.keep()
        self._kept.run = self._run_kept
        for name in self._kept_undo:
            self._kept.groups[name] = self._serialized(name)
        self._kept.keep_payloads(self.shelf.is_used)
        return self._kept

    def _serialized(self, name: str) -> bytes | None:
        """The record of that name as it is now; None where there is none."""
        if not is_parcel(name) and not is_tally(name):
            return self.groups.serialized(name) if name in self.groups else None
        record = self.shelf.records.get(name) if is_parcel(name) else self.tallies.get(tally_version(name))
        return None if record is None else record.SerializeToString()

    def settle(self) -> None:
        """The delta is stored."""
        self.keep()
        for name, record in self._kept.groups.items():
            if record is not None and name in self._trained_by:
                self.groups.pack(name, record)
        self._run_committed = self._run_kept
        self._kept_undo, self._kept, self._is_turned = {}, Delta(run=b""), False

    def rollback(self) -> None:
        """The delta was not stored: back to the last commit."""
        self._restore(self._undo | self._kept_undo, self._run_committed)
        self._forget(self._run_committed)

    def take_over(self, snapshot: Snapshot) -> Iterator[None]:
        """Take over what the store holds, slice by slice, nothing pending; only a copy that has all of them is whole.

        Between slices each record is as it was before or as it is after. Raises RunConflictError before the first.
        """
        run = RunRecord.FromString(snapshot.run)
        if run.format > FORMAT:
            raise RunConflictError(
                f"run {run.run_id!r} was written by a newer Penstock (format {run.format}, this one reads {FORMAT}); "
                "use that one",
                run_id=run.run_id,
            )
        if snapshot.is_full or run.payload_gone:
            self._reset(run)
        self.run = run
        self._read_limits()
        # Records that are being deleted are in nobody's way any more.
        num_bytes = 0
        for name, record in ({} if run.payload_gone else snapshot.groups).items():
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

    def _forget(self, run: bytes) -> None:
        self._undo, self._kept_undo, self._is_turned = {}, {}, False
        self.pending, self._kept = Delta(run=b""), Delta(run=b"")
        self._run_kept = self._run_committed = run

    def _read_limits(self) -> None:
        if self.run.HasField("limits"):
            self.limits = Limits.from_proto(self.run.limits)
            self.policy = Policy.from_proto(self.run.policy, self.limits)

    def _replace(self, name: str, record: bytes | None) -> None:
        if is_parcel(name):
            self.shelf.remove(name)
            if record is not None:
                self.shelf.add(name, ParcelRecord.FromString(record))
        elif is_tally(name):
            self.tallies.pop(tally_version(name), None)
            if record is not None:
                self.tallies[tally_version(name)] = StepTally.FromString(record)
        else:
            self._replace_group(name, record)

    def _replace_group(self, group_id: str, record: bytes | None) -> None:
        self._unindex(group_id)
        self.groups.remove(group_id)
        if record is None:
            return
        head = head_of(record)
        if head.HasField("trained_version"):
            self.groups.pack(group_id, record)
            self._index_trained(group_id, head.trained_version)
        else:
            group = GroupRecord.FromString(record)
            self.groups.put(group)
            self._index(group)

    # -- the queues ----------------------------------------------------------------------------------------------------

    def _index(self, group: GroupRecord) -> None:
        group_id = group.group_id
        if group.HasField("trained_version"):
            self._index_trained(group_id, group.trained_version)
            return
        entry = self._entries[group_id] = _Entry()
        self.live.add(group_id)
        is_training = group.purpose == types_pb2.PURPOSE_TRAIN
        entry.states = _states(group)
        self._count(entry, 1)
        version = group_version(group)
        if is_training and version is not None:
            self.versions[group_id] = version
        if group.consumer_id:
            self.delivered[group.purpose].add(group_id)
            return
        num_queued, num_ready = 0, 0
        for index, sample in enumerate(group.samples):
            if sample.state == _QUEUED:
                num_queued += 1
            elif sample.state in _READY_STATES:
                num_ready += 1
            else:
                self._index_sample(entry, group, index, sample)
        if num_queued:
            self._queue(entry, group, num_queued, is_started=version is not None)
            if not any(sample.num_leases for sample in group.samples):
                self._waiting[group.purpose].add(group_id)
        elif num_ready == len(group.samples):
            self.ready[group.purpose].add(group_id)

    def _index_trained(self, group_id: str, version: int) -> None:
        self._trained_by[group_id] = version
        self.trained.setdefault(version, set()).add(group_id)

    def _count(self, entry: _Entry, sign: int) -> None:
        for sample_state, count in entry.states.items():
            self.num_samples[sample_state] += sign * count

    def _queue(self, entry: _Entry, group: GroupRecord, num_queued: int, *, is_started: bool) -> None:
        """Place a group in the queues; by length only where the run's dispatch looks at lengths."""
        queued = QueuedGroup(
            sequence=group.sequence,
            is_evaluation=group.purpose == types_pb2.PURPOSE_EVALUATE,
            is_started=is_started,
            predicted_tokens=_predicted(group),
        )
        entry.ranks[Order.ARRIVAL] = queued.rank_by_arrival
        if self.policy.dispatches_by_length:
            entry.ranks[Order.LENGTH] = queued.rank_by_length(self.limits.groups_per_step)
        for order, rank in entry.ranks.items():
            self.queues[order].add(rank)
        entry.queued_length, entry.num_queued = queued.predicted_tokens, num_queued
        self.queued_lengths.add(entry.queued_length, num_queued)

    def _index_sample(self, entry: _Entry, group: GroupRecord, index: int, sample: SampleRecord) -> None:
        key = (group.group_id, index)
        if sample.state == _LEASED:
            self.generation_leases.setdefault(sample.generator_id, {})[sample.lease_id] = key
            entry.generation.append((sample.generator_id, sample.lease_id))
        elif sample.state == _SCORING:
            self.scoring_leases.setdefault(sample.worker_id, {})[sample.scoring_lease_id] = key
            entry.scoring.append((sample.worker_id, sample.scoring_lease_id))
        elif sample.state == _FINISHED:
            finished = (int(group.purpose == types_pb2.PURPOSE_TRAIN), group.sequence, index)
            self.finished.add(finished)
            entry.finished.append(finished)

    def _unindex(self, group_id: str) -> None:
        version = self._trained_by.pop(group_id, None)
        if version is not None:
            self.trained[version].discard(group_id)
            if not self.trained[version]:
                del self.trained[version]
        entry = self._entries.pop(group_id, None)
        if entry is None:
            return
        for order, rank in entry.ranks.items():
            self.queues[order].discard(rank)
        if entry.num_queued:
            self.queued_lengths.add(entry.queued_length, -entry.num_queued)
        for finished in entry.finished:
            self.finished.discard(finished)
        _remove(self.generation_leases, entry.generation)
        _remove(self.scoring_leases, entry.scoring)
        self._count(entry, -1)
        self.live.discard(group_id)
        self.versions.pop(group_id, None)
        for groups in (*self.ready.values(), *self.delivered.values(), *self._waiting.values()):
            groups.discard(group_id)


def _states(group: GroupRecord) -> Counter[broker_pb2.SampleState.ValueType]:
    """Samples by state; none of an evaluation, which is on no books."""
    is_training = group.purpose == types_pb2.PURPOSE_TRAIN
    return Counter([sample.state for sample in group.samples] if is_training else ())


def _predicted(group: GroupRecord) -> float:
    """Forecast length of the group's completions, 0 when there is none; siblings share it, as they share the prompt."""
    return group.samples[0].predicted_tokens if group.samples else 0.0


def _remove(leases: Leases, items: list[tuple[str, str]]) -> None:
    for holder, lease_id in items:
        held = leases[holder]
        del held[lease_id]
        if not held:
            del leases[holder]
