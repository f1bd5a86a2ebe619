"""Implements `Store` on dictionaries, as its reference. For tests and trials; nothing survives the process."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from penstock.clock import Clock, SystemClock
from penstock.wire.codec import Packed
from services.broker.records.roll import Broker, Roll, StoredRoll
from services.broker.records.run_clock import MAX_GAP_S, Reading, StoredClock
from services.broker.records.shard_ids import is_shard_id
from services.broker.records.store import (
    MARKS_KEPT,
    MAX_BUSY_SPANS,
    MAX_CHANGED_BYTES,
    MIN_RETIRED_KEPT,
    ConflictError,
    Delta,
    LostMarkError,
    Mark,
    PayloadSlice,
    Replacement,
    RetiredError,
    Root,
    SampleId,
    Snapshot,
)
from services.broker.state.counters import folded


@dataclass(slots=True)
class _Run:
    run: bytes = b""
    mark: Mark | None = None
    marks: dict[int, Mark] = field(default_factory=dict)
    """The last marks by revision, oldest first."""
    changed: dict[str, int] = field(default_factory=dict)
    """Revision that last changed each group, oldest first, as far back as the marks."""
    groups: dict[str, bytes] = field(default_factory=dict)
    prompts: dict[str, bytes] = field(default_factory=dict)
    chunks: dict[SampleId, list[bytes]] = field(default_factory=dict)
    payloads: dict[str, bytes] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    retired_earlier: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    peers: dict[str, bytes] = field(default_factory=dict)
    spans: dict[str, list[bytes]] = field(default_factory=dict)
    clock: StoredClock = field(default_factory=StoredClock)

    def known_retired(self, group_ids: Collection[str]) -> set[str]:
        """The ids among these that are retired."""
        return self.retired.intersection(group_ids) | self.retired_earlier.intersection(group_ids)


class MemoryStore:
    """A `Store` that several brokers of one process may share."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._runs: dict[str, _Run] = {}
        self._clock = clock or SystemClock()
        self._roll = StoredRoll()

    async def load(self, run_id: str, since: Mark | None) -> Snapshot | None:
        """See `Store.load`."""
        run = self._runs.get(run_id)
        if run is None or run.mark is None:
            return None
        clock = run.clock.read(self._clock.now_s(), MAX_GAP_S)
        if since is None:
            return Snapshot(mark=run.mark, is_full=True, run=run.run, groups=dict(run.groups), clock=clock)
        if run.marks.get(since.revision) != since:
            raise LostMarkError(run_id)
        names = [name for name, revision in run.changed.items() if revision > since.revision]
        groups = {name: run.groups.get(name) for name in names}
        if sum(len(record or b"") for record in groups.values()) > MAX_CHANGED_BYTES:
            raise LostMarkError(run_id)
        return Snapshot(mark=run.mark, is_full=False, run=run.run, groups=groups, clock=clock)

    async def tick(
        self, run_id: str, max_gap_s: float, *, broker: str = "", is_leaving: bool = False, is_behind: bool = False
    ) -> Reading:
        """See `Store.tick`."""
        return self._run(run_id).clock.advance(
            self._clock.now_s(), max_gap_s, broker=broker, is_leaving=is_leaving, is_behind=is_behind
        )

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        """See `Store.commit`."""
        run = self._runs.get(run_id)
        if (run.mark if run else None) != expected:
            raise ConflictError(run_id)
        run = self._runs.setdefault(run_id, _Run())
        known = run.known_retired(delta.fresh)
        if known:
            raise RetiredError(known)
        mark = Mark((expected.revision if expected else 0) + 1, secrets.token_hex(8))
        run.mark, run.run = mark, delta.run
        _remember(run, mark, delta)
        _write(run.groups, delta.groups)
        _write(run.prompts, delta.prompts)
        for sample in delta.cleared:
            run.chunks.pop(sample, None)
        for sample, chunk in delta.chunks:
            run.chunks.setdefault(sample, []).append(chunk)
        run.retired |= delta.retired
        if len(run.retired) > MIN_RETIRED_KEPT:
            run.retired, run.retired_earlier = set(), run.retired
        for name, count in delta.counts.items():
            run.counts[name] = run.counts.get(name, 0) + count
        if delta.fold_version is not None:
            run.counts = folded(run.counts, delta.fold_version)
        run.payloads.update((payload_id, bytes(data)) for payload_id, data in delta.payloads.items() if data)
        for payload_id in delta.dropped_payloads:
            run.payloads.pop(payload_id, None)
        return mark

    async def records(self, run_id: str, names: Sequence[str]) -> list[bytes | None]:
        """See `Store.records`."""
        groups = self._run(run_id).groups
        return [groups.get(name) for name in names]

    async def prompts(self, run_id: str, group_ids: Sequence[str]) -> list[bytes | None]:
        """See `Store.prompts`."""
        prompts = self._run(run_id).prompts
        return [prompts.get(group_id) for group_id in group_ids]

    async def chunks(self, run_id: str, samples: Sequence[SampleId]) -> list[list[bytes]]:
        """See `Store.chunks`."""
        chunks = self._run(run_id).chunks
        return [list(chunks.get(sample, ())) for sample in samples]

    async def replace_chunks(self, run_id: str, replacements: Sequence[Replacement]) -> list[bool]:
        """See `Store.replace_chunks`."""
        run = self._run(run_id)
        flags = [run.groups.get(each.name) == each.record for each in replacements]
        for each, is_same in zip(replacements, flags, strict=True):
            if is_same:
                run.chunks.update({sample: [chunk] for sample, chunk in each.chunks.items()})
        return flags

    async def books(self, run_id: str) -> tuple[Mark, Mapping[str, int]] | None:
        """See `Store.books`."""
        run = self._runs.get(run_id)
        return None if run is None or run.mark is None else (run.mark, dict(run.counts))

    async def put_payload(self, run_id: str, payload_id: str, payload: Packed) -> None:
        """See `Store.put_payload`."""
        self._run(run_id).payloads[payload_id] = bytes(payload)

    async def payloads(self, run_id: str, slices: Sequence[PayloadSlice]) -> list[bytes]:
        """See `Store.payloads`."""
        payloads = self._run(run_id).payloads
        return [payloads.get(part.payload_id, b"")[part.start : part.end] for part in slices]

    async def retired(self, run_id: str, group_ids: Sequence[str]) -> set[str]:
        """See `Store.retired`."""
        return self._run(run_id).known_retired(group_ids)

    async def put_peers(
        self, run_id: str, views: Mapping[str, bytes], busy_spans: Mapping[str, Sequence[bytes]]
    ) -> None:
        """See `Store.put_peers`."""
        run = self._run(run_id)
        run.peers.update(views)
        for peer_id, spans in busy_spans.items():
            run.spans[peer_id] = [*run.spans.get(peer_id, ()), *spans][-MAX_BUSY_SPANS:]

    async def peers(self, run_id: str) -> dict[str, bytes]:
        """See `Store.peers`."""
        return dict(self._run(run_id).peers)

    async def forget_peers(self, run_id: str, peer_ids: Sequence[str]) -> None:
        """See `Store.forget_peers`."""
        run = self._run(run_id)
        for peer_id in peer_ids:
            run.peers.pop(peer_id, None)
            run.spans.pop(peer_id, None)

    async def busy_spans(self, run_id: str, peer_id: str) -> list[bytes]:
        """See `Store.busy_spans`."""
        return list(self._run(run_id).spans.get(peer_id, ()))

    async def run_ids(self) -> list[str]:
        """See `Store.run_ids`."""
        return [run_id for run_id in self._runs if not is_shard_id(run_id)]

    async def roots(self, run_ids: Sequence[str]) -> list[Root | None]:
        """See `Store.roots`."""
        runs = [self._run(run_id) for run_id in run_ids]
        return [Root(mark=run.mark, run=run.run, num_records=len(run.groups)) if run.mark else None for run in runs]

    async def answer_roll(self, broker: Broker, process: str, *, is_leaving: bool = False) -> Roll:
        """See `Store.answer_roll`."""
        return self._roll.answer(broker, process, now_s=self._clock.now_s(), is_leaving=is_leaving)

    async def note_shards(self, run_id: str, num_shards: int) -> None:
        """See `Store.note_shards`."""
        self._roll.note_shards(run_id, num_shards)

    async def now_s(self, run_id: str) -> float:
        """See `Store.now_s`."""
        return time.time()

    async def purge(self, run_id: str, expected: Mark) -> AsyncIterator[int]:
        """See `Store.purge`."""
        run = self._run(run_id)
        if run.mark != expected:
            raise ConflictError(run_id)
        num_keys = len(run.groups) + len(run.chunks) + len(run.payloads)
        for content in (run.groups, run.chunks, run.payloads, run.prompts, run.retired, run.retired_earlier):
            content.clear()
        yield num_keys

    async def delete(self, run_id: str, expected: Mark | None) -> None:
        """See `Store.delete`."""
        if self._run(run_id).mark != expected:
            raise ConflictError(run_id)
        self._runs.pop(run_id, None)

    async def ping(self) -> None:
        """See `Store.ping`."""

    async def close(self) -> None:
        """See `Store.close`."""

    def _run(self, run_id: str) -> _Run:
        return self._runs.get(run_id) or _Run()


def _remember(run: _Run, mark: Mark, delta: Delta) -> None:
    """Record the commit's changes, and forget those that no copy loading a difference needs."""
    oldest = mark.revision - MARKS_KEPT
    run.marks[mark.revision] = mark
    run.marks.pop(oldest, None)
    for group_id in delta.groups:
        run.changed.pop(group_id, None)
        run.changed[group_id] = mark.revision
    for group_id in list(takewhile(lambda name: run.changed[name] <= oldest, run.changed)):
        del run.changed[group_id]


def _write(target: dict[str, bytes], changes: dict[str, bytes | None]) -> None:
    for key, value in changes.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value
