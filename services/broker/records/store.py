"""Defines the store of a run's records and payload, as the broker requires it.

A run is a versioned document: one RunRecord, one GroupRecord per live or retained group, a few small records besides
(`state.other_records`), and payload beside them. A broker process works on a copy of the records and commits changes
against the mark it last saw, so any number of processes may serve one run and every decision is taken by the same
Python code whatever the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.wire.codec import Packed
from services.broker.records.ended import Ended
from services.broker.records.roll import Broker, Roll
from services.broker.records.run_clock import Reading

SampleId = tuple[str, int]
"""Group id and sample index."""


class ConflictError(Exception):
    """The run changed since the given mark; nothing was stored. Load, decide again, commit again."""


class LostMarkError(Exception):
    """A copy cannot be brought up to date by what changed since its mark: load everything."""


class RetiredError(Exception):
    """Ids that a change treats as new belong to retired groups; nothing was stored. Decide again without them."""

    def __init__(self, group_ids: Collection[str]) -> None:
        super().__init__(f"{len(group_ids)} ids are retired")
        self.group_ids = group_ids


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a run's history: the number of commits, and the name of the last one.

    The name distinguishes a continued history from one that lost its end (a Redis back without its last second).
    """

    revision: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadSlice:
    """A part of a put's payload."""

    payload_id: str
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Length of the part."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The changes that bring a copy of the records to `mark`."""

    mark: Mark
    is_full: bool
    """Whether it is complete; else it has only the changes since the requested mark."""
    run: bytes
    """RunRecord."""
    groups: Mapping[str, bytes | None]
    """Records by name; None if removed."""
    clock: Reading
    """The run's clock when this was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A run without its groups."""

    mark: Mark
    run: bytes
    """RunRecord."""
    num_records: int
    """Number of its other records."""


@dataclass(slots=True, kw_only=True)
class Delta:
    """One change of a run, stored whole or not at all."""

    run: bytes
    groups: dict[str, bytes | None] = field(default_factory=dict)
    """Records by name; None removes one."""
    prompts: dict[str, bytes | None] = field(default_factory=dict)
    """Prompts by group id; None removes one."""
    cleared: set[SampleId] = field(default_factory=set)
    """Samples whose chunks are deleted, before any are appended."""
    chunks: list[tuple[SampleId, bytes]] = field(default_factory=list)
    """TokenChunks to append, in order."""
    retired: set[str] = field(default_factory=set)
    """Groups whose records are removed, but whose ids must never be accepted again."""
    counts: dict[str, int] = field(default_factory=dict)
    """Additions to the audit counters, by name; see `counters`."""
    fold_version: int | None = None
    """Afterwards, add the counters of older versions to those of this one; None folds nothing."""
    fresh: list[str] = field(default_factory=list)
    """Ids treated as new: the change is refused if one of them is retired."""
    payloads: dict[str, Packed] = field(default_factory=dict)
    """Payload of puts by payload id; empty if `put_payload` stored it ahead."""
    dropped_payloads: set[str] = field(default_factory=set)
    """Payload ids to delete."""
    ended: list[Ended] = field(default_factory=list)
    """What this change ends, in order; not stored."""

    def absorb(self, later: Delta) -> None:
        """Add the changes of a later operation other than records."""
        self.prompts.update(later.prompts)
        if later.cleared:
            self.cleared |= later.cleared
            self.chunks = [item for item in self.chunks if item[0] not in later.cleared]
        self.chunks += later.chunks
        self.retired |= later.retired
        for name, count in later.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        # Counters of later operations are named for the folded version already.
        self.fold_version = self.fold_version if later.fold_version is None else later.fold_version
        self.fresh += later.fresh
        self.payloads.update(later.payloads)
        self.dropped_payloads |= later.dropped_payloads
        self.ended += later.ended

    def keep_payloads(self, is_used: Callable[[str], bool]) -> None:
        """Leave out payload that no record uses any more, and keep payload that is still used."""
        self.dropped_payloads = {payload_id for payload_id in self.dropped_payloads if not is_used(payload_id)}
        self.payloads = {payload_id: data for payload_id, data in self.payloads.items() if is_used(payload_id)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Lists of chunks to be replaced by one chunk each, while the record of their group is the given one."""

    name: str
    record: bytes
    chunks: Mapping[SampleId, bytes]


class Store(Protocol):
    """Durable state of all runs.

    Atomicity: `commit` stores a delta whole or not at all, and returns only after the store has it. Commits of one run
    form one sequence; `load` never shows half a commit. Peers and busy spans are hints outside of that sequence.
    Every call raises ServiceUnavailableError when the store cannot be reached within a few seconds; such a commit
    may or may not have been stored, and the caller must load again to know.
    """

    async def load(self, run_id: str, since: Mark | None) -> Snapshot | None:
        """The run as a change of the copy at `since`, or all of it. None: no such run.

        All of it is read in slices, without blocking the event loop or the store, and without a deadline.
        Raises LostMarkError if the mark is not known (any more), or more than MAX_CHANGED_BYTES have changed.
        """
        ...

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        """Store a change on top of `expected` (None: the run must not exist). Raises ConflictError, RetiredError."""
        ...

    async def tick(
        self, run_id: str, max_gap_s: float, *, broker: str = "", is_leaving: bool = False, is_behind: bool = False
    ) -> Reading:
        """Advance the run's clock, see `run_clock`; a longer time since this was last called is a gap.

        `broker` names the process, if it has stored every renewal that it had read when it last called this; with
        `is_leaving` it has no stream of the run any more, with `is_behind` it may not have heard its holders. If the
        run does not exist, the store's own time.
        """
        ...

    async def records(self, run_id: str, names: Sequence[str]) -> list[bytes | None]:
        """Records by name as last committed, None if missing; without those of other names, or a mark."""
        ...

    async def prompts(self, run_id: str, group_ids: Sequence[str]) -> list[bytes | None]:
        """Prompts as stored, None if missing."""
        ...

    async def chunks(self, run_id: str, samples: Sequence[SampleId]) -> list[list[bytes]]:
        """The accepted chunks of each sample, in order."""
        ...

    async def replace_chunks(self, run_id: str, replacements: Sequence[Replacement]) -> list[bool]:
        """Replace chunks beside the sequence of commits; for each, whether its record was the given one.

        Each is replaced whole or not at all, and may be repeated.
        """
        ...

    async def books(self, run_id: str) -> tuple[Mark, Mapping[str, int]] | None:
        """Every audit counter, and the commit they belong to. None: no such run."""
        ...

    async def put_payload(self, run_id: str, payload_id: str, payload: Packed) -> None:
        """Store a large payload ahead of the commit that makes it durable; it expires without one."""
        ...

    async def payloads(self, run_id: str, slices: Sequence[PayloadSlice]) -> list[bytes]:
        """Parts of payloads; shorter than requested if the payload is gone."""
        ...

    async def retired(self, run_id: str, group_ids: Sequence[str]) -> set[str]:
        """The ids among these that belong to retired groups: the last MIN_RETIRED_KEPT, and up to as many before."""
        ...

    async def put_peers(
        self, run_id: str, views: Mapping[str, bytes], busy_spans: Mapping[str, Sequence[bytes]]
    ) -> None:
        """Store peers' latest views by id, and append spans to some, of which the newest MAX_BUSY_SPANS are kept."""
        ...

    async def peers(self, run_id: str) -> dict[str, bytes]:
        """The peers' views by id."""
        ...

    async def forget_peers(self, run_id: str, peer_ids: Sequence[str]) -> None:
        """Remove peers and their spans; unknown ones are no error."""
        ...

    async def busy_spans(self, run_id: str, peer_id: str) -> list[bytes]:
        """The spans of a peer, oldest first."""
        ...

    async def run_ids(self) -> list[str]:
        """Every run, oldest first."""
        ...

    async def roots(self, run_ids: Sequence[str]) -> list[Root | None]:
        """Runs without their groups; None if there is no such run."""
        ...

    async def answer_roll(self, broker: Broker, process: str, *, is_leaving: bool = False) -> Roll:
        """Say that a broker lives, or that it leaves, and hear who lives; see `roll`.

        `process` tells it from any other process of that name.
        """
        ...

    async def note_shards(self, run_id: str, num_shards: int) -> None:
        """Note with the roll how many token shards an open run has; 0 forgets it."""
        ...

    async def now_s(self, run_id: str) -> float:
        """Unix time by the clock of the store's machine that has this run."""
        ...

    def purge(self, run_id: str, expected: Mark) -> AsyncIterator[int]:
        """Delete the records and payload of a run, slice by slice; yields how many keys and records each slice took.

        The run, its counters and its peers remain. The caller has marked the run, so that it is no longer written to.
        Raises ConflictError if the run is no longer at `expected`.
        """
        ...

    async def delete(self, run_id: str, expected: Mark | None) -> None:
        """Delete what `purge` leaves. Raises ConflictError if the run is not at `expected` (None: no such run)."""
        ...

    async def ping(self) -> None:
        """Raise ServiceUnavailableError unless the store answers."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


MAX_BUSY_SPANS = 20_000
"""About an hour of a generator that reports five spans a second; 0.5 MiB."""
MAX_CHANGED_BYTES = 16 * 1024 * 1024
"""Bytes of records read at once."""
MIN_RETIRED_KEPT = 1_048_576
"""Ids of retired groups that are recognised; up to twice as many are, at about 70 bytes each."""
MARKS_KEPT = 2_000
"""Commits a copy may be behind and still load only the difference."""
