"""Holds a token shard inside one broker process, and keeps its run up to date about it.

Promises:
- An answer to chunks that end samples is given only once the run knows of those ends; ends that it does not know, left
  over by a process that died, are reported again.
- A shard document is made only for a lease that the run has granted, and one of an earlier run of that id is deleted
  before it is used. It may be changed by several processes at once: each commit then fails for all but one of them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import structlog

from penstock.errors import PenstockError, ServiceUnavailableError, UnknownRunError
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations.chunk_rules import Accepted
from services.broker.records.run_clock import RunClock
from services.broker.records.shard_ids import shard_id
from services.broker.records.store import ConflictError, SampleId, Store
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.records_pb2 import GroupRecord, SampleTail, ShardRecord
from services.broker.replicas.document_replica import MAX_ATTEMPTS, Replica
from services.broker.shards import acceptance, tails
from services.broker.shards.acceptance import Answer
from services.broker.shards.end_reports import REPORTS_AT_ONCE, EndReports
from services.broker.shards.run_facts import FactsOfRuns, RunFacts, check_open
from services.broker.shards.shard_interfaces import Core
from services.broker.shards.shard_metrics import ShardMetrics
from services.broker.shards.shard_removal import remove_stale
from services.broker.shards.shard_state import ShardState

REPORT_AGAIN_AFTER_S = 1.0
"""An end that the run has not confirmed for this long is reported again."""
CLEAN_EVERY_S = 10.0
GROUPS_AT_ONCE = 500
MAX_CREATIONS = 3

_T = TypeVar("_T")
_log = structlog.get_logger()


class ShardReplica(Replica[ShardState]):
    """See the module."""

    def __init__(
        self, run_id: str, shard: int, *, store: Store, clock: RunClock, core: Core, runs: FactsOfRuns
    ) -> None:
        document_id = shard_id(run_id, shard)
        super().__init__(
            document_id, name=f"token shard {shard} of run {run_id!r}", make=ShardState, store=store, clock=clock
        )
        self.core_id = run_id
        """The run."""
        self.shard = shard
        self.num_mismatches = 0
        """Leases that did not continue what the shard has: the store has lost something."""
        self._core = core
        self._runs = runs
        self._ends = EndReports(self._tell_ends)
        self._noting: set[asyncio.Task[None]] = set()
        self._looked_s = self._cleaned_s = self._absent_s = -math.inf
        """When what is done now and then was done, and when there was no document."""
        self._overdue: set[SampleId] | None = None
        """Ends that the run had yet to confirm at the last look; None before the first, when all are overdue."""
        self._observed = 0, 0, 0

    # -- the calls of `TokenShards` ------------------------------------------------------------------------------------

    async def accept(self, generator_id: str, chunks: Sequence[ChunkFacts]) -> Accepted:
        """See `TokenShards.accept`."""
        newest = max((chunk.max_version or 0 for chunk in chunks), default=0)
        facts = await self.facts(version=newest, needs_open=True)
        check_open(facts, self.core_id)
        decide = partial(acceptance.accept_chunks, shard=self.shard, generator_id=generator_id, facts=facts)
        try:
            answer = await self.transact(partial(decide, chunks=chunks, now_s=self.clock.now_s()))
        except UnknownRunError:
            answer = Answer(accepted=Accepted(errors=[], repeated=[]), unknown=list(chunks))
        answers = [answer, await self._adopt(answer.unknown, decide)] if answer.unknown else [answer]
        await self._ends.tell([end for each in answers for end in each.ends])
        return Accepted(
            errors=[error for each in answers for error in each.accepted.errors],
            repeated=[chunk for each in answers for chunk in each.accepted.repeated],
        )

    async def seal(self, requests: Sequence[SealRequest]) -> list[SampleTail]:
        """See `TokenShards.seal`."""
        facts = await self.facts()
        if facts.is_gone:
            raise _gone(self.core_id)
        return await self._change(lambda state: tails.seal(state, requests))

    async def _adopt(self, chunks: Sequence[ChunkFacts], decide: Callable[..., Answer]) -> Answer:
        """Accept chunks under leases that the shard does not know, by what the run says of them."""
        names = list(dict.fromkeys(chunk.group_id for chunk in chunks))
        found = await self.store.records(self.core_id, names)
        records = {
            name: None if record is None else GroupRecord.FromString(record)
            for name, record in zip(names, found, strict=True)
        }
        decide = partial(decide, chunks=chunks, now_s=self.clock.now_s(), records=records)
        try:
            answer = await self.transact(decide)
        except UnknownRunError:
            empty = ShardState()
            answer = decide(empty)
            if empty.is_changed:
                answer = await self._change(decide)
        self.num_mismatches += len(answer.mismatches)
        for sample in answer.mismatches:
            _log.error("a lease does not continue what its shard has", run_id=self.core_id, sample=sample)
        return answer

    async def _change(self, operation: Callable[[ShardState], _T]) -> _T:
        """Change the shard, which is made if need be."""
        for _ in range(MAX_CREATIONS):
            try:
                return await self.transact(operation)
            except UnknownRunError:
                facts = await self._runs.read_now(self.core_id)
                record = ShardRecord(run_id=self.core_id, shard=self.shard, open_s=facts.open_s)
                await self.transact(partial(_create, record=record), may_create=True)
        return await self.transact(operation)

    # -- housekeeping --------------------------------------------------------------------------------------------------

    async def facts(self, *, version: int = 0, needs_open: bool = False) -> RunFacts:
        """What the shard knows of its run, see `FactsOfRuns.of`; what it has of one before of that id is deleted."""
        facts = await self._runs.of(self.core_id, version=version, needs_open=needs_open)
        await self.load()
        return await self._of_this_run(facts)

    async def _of_this_run(self, facts: RunFacts) -> RunFacts:
        if self.copy is not None and self.copy.shard.open_s != facts.open_s:
            # Either is of an earlier run, perhaps only in this process.
            await self._remove_stale()
            facts = await self._runs.read_now(self.core_id)
        return facts

    async def load(self) -> None:
        """Have a copy, if there is a document."""
        if self.copy is None:
            try:
                await self.transact(lambda _state: None, must_verify=False)
            except UnknownRunError:
                self._absent_s = self.clock.monotonic_s()

    async def _remove_stale(self) -> None:
        """Delete the document if it is of an earlier run, and the copy; see `shard_removal`."""
        for _ in range(MAX_ATTEMPTS):
            with suppress(ConflictError):
                is_gone = await remove_stale(self.store, self.core_id, self.shard)
                _log.info("a token shard of an earlier run", run_id=self.core_id, shard=self.shard, is_gone=is_gone)
                self._forget()
                return
        raise ServiceUnavailableError(f"{self._name}: others kept changing it while it was being deleted")

    async def is_closed(self) -> bool:
        """Whether it has a copy, of a run that is closed. Raises UnknownRunError."""
        return self.copy is not None and (await self.facts()).is_closed

    async def care(self) -> None:
        """Tell the run what is due, and forget what it needs no more; called a few times a second.

        Raises UnknownRunError once the run is gone, and the shard with it.
        """
        try:
            facts = await self._runs.of(self.core_id)
            if self.clock.monotonic_s() - self._absent_s >= CLEAN_EVERY_S:
                await self.load()
            facts = await self._of_this_run(facts)
            if facts.is_gone:
                raise _gone(self.core_id)
        except UnknownRunError:
            await self._remove_stale()
            raise
        if self.copy is None:
            return
        now_s = self.clock.monotonic_s()
        if now_s - self._looked_s >= REPORT_AGAIN_AFTER_S:
            self._looked_s = now_s
            await self._tell_overdue(self.copy.ended)
        if now_s - self._cleaned_s >= CLEAN_EVERY_S:
            self._cleaned_s = now_s
            await self._clean()

    @property
    def has_grown(self) -> bool:
        """Whether there is any `progress`."""
        return self.copy is not None and bool(self.copy.grown)

    async def progress(self) -> list[TailReport]:
        """What the shard has of samples that grew since this was called."""
        if self.copy is None:
            return []
        grown, reports = list(self.copy.grown), list[TailReport]()
        self.copy.grown.clear()
        for start in range(0, len(grown), REPORTS_AT_ONCE):
            some = grown[start : start + REPORTS_AT_ONCE]
            # Through a transaction: the copy may have tokens that are not stored.
            tell = partial(tails.progress, samples=some, shard=self.shard)
            reports += await self.transact(tell, must_verify=False)
        return reports

    def observe(self, metrics: ShardMetrics) -> None:
        """Count in the metrics what happened since the last time."""
        present = self.num_commits, self.num_conflicts, self.num_mismatches
        for counter, now, before in zip(
            (metrics.commits, metrics.conflicts, metrics.mismatches), present, self._observed, strict=True
        ):
            counter.labels(self.core_id).inc(now - before)
        self._observed = present

    async def settled(self) -> None:
        """Wait for background work."""
        if self._noting:
            await asyncio.wait(self._noting)

    async def _tell_overdue(self, ended: set[SampleId]) -> None:
        overdue = set(ended) if self._overdue is None else ended & self._overdue
        self._overdue = set(ended)
        if overdue:
            await self._ends.tell(await self.transact(partial(tails.unreported, samples=overdue), must_verify=False))

    async def _clean(self) -> None:
        group_ids = [] if self.copy is None else self.copy.group_ids
        for start in range(0, len(group_ids), GROUPS_AT_ONCE):
            some = group_ids[start : start + GROUPS_AT_ONCE]
            retired = await self.store.retired(self.core_id, some)
            if retired:
                await self.transact(partial(tails.forget, group_ids=sorted(retired)), must_verify=False)

    async def _tell_ends(self, reports: Sequence[TailReport]) -> None:
        await self._core.report(self.core_id, self.shard, reports)
        # Not waited for: an end without the note is reported again.
        noting = asyncio.create_task(self._note_reported(reports))
        self._noting.add(noting)
        noting.add_done_callback(self._noting.discard)

    async def _note_reported(self, reports: Sequence[TailReport]) -> None:
        with suppress(PenstockError):
            await self.transact(partial(tails.confirm, reports=reports), must_verify=False)


def _gone(run_id: str) -> UnknownRunError:
    return UnknownRunError(f"the records of run {run_id!r} are deleted", run_id=run_id)


def _create(state: ShardState, *, record: ShardRecord) -> None:
    if not state.shard.run_id:
        state.create(record)
