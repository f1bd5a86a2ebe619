"""Keeps the token shards that a broker process works on: implements `TokenShards` for itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import structlog

from penstock.errors import InvalidFieldError, PenstockError, UnknownRunError
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations.chunk_rules import Accepted
from services.broker.records.run_clock import RunClock
from services.broker.records.shard_ids import MAX_TOKEN_SHARDS
from services.broker.records.store import Store
from services.broker.records.token_tails import SealRequest
from services.broker.records_pb2 import SampleTail
from services.broker.shards.end_reports import REPORTS_AT_ONCE
from services.broker.shards.run_facts import FactsOfRuns
from services.broker.shards.shard_interfaces import Core
from services.broker.shards.shard_metrics import ShardMetrics
from services.broker.shards.shard_replica import ShardReplica

CARE_EVERY_S = 0.25
"""Of each shard: what is due then, it knows itself."""
SHARDS_AT_ONCE = 32
IDLE_SHARD_S = 60.0
"""A shard without groups, or of another owner, that is unused for this long is unloaded."""

_log = structlog.get_logger()


class ShardRegistry:
    """Shard replicas by run and number, made on demand."""

    def __init__(
        self,
        *,
        store: Store,
        core: Core,
        facts: FactsOfRuns,
        clock_of: Callable[[str], RunClock],
        metrics: ShardMetrics | None = None,
        is_ours: Callable[[str, int], bool] = lambda _run_id, _shard: True,
    ) -> None:
        """`clock_of` returns a run's clock in this process; `is_ours` says which shards the process looks after."""
        self.core = core
        """Set before the first call."""
        self._store, self._facts, self._clock_of = store, facts, clock_of
        self.is_ours = is_ours
        self._metrics = metrics
        self._replicas: dict[tuple[str, int], ShardReplica] = {}
        self._reported_s: dict[str, float] = {}
        """When the progress of each run was last reported to its core."""

    def replica(self, run_id: str, shard: int) -> ShardReplica:
        """The replica of a shard that may or may not exist. Raises InvalidFieldError."""
        if not 1 <= shard <= MAX_TOKEN_SHARDS:
            raise InvalidFieldError(f"token_shard: {shard}; must be what the lease says", field="token_shard")
        clock, replica = self._clock_of(run_id), self._replicas.get((run_id, shard))
        if replica is None:
            replica = ShardReplica(run_id, shard, store=self._store, clock=clock, core=self.core, runs=self._facts)
            self._replicas[run_id, shard] = replica
        # The run may have been unloaded and loaded again since.
        replica.clock = clock
        return replica

    @property
    def num_conflicts(self) -> int:
        """Commits that failed because another process had changed a shard."""
        return sum(replica.num_conflicts for replica in self._replicas.values())

    async def accept(self, run_id: str, shard: int, generator_id: str, chunks: Sequence[ChunkFacts]) -> Accepted:
        """See `TokenShards.accept`."""
        return await self.replica(run_id, shard).accept(generator_id, chunks)

    async def seal(self, run_id: str, shard: int, samples: Sequence[SealRequest]) -> list[SampleTail]:
        """See `TokenShards.seal`."""
        return await self.replica(run_id, shard).seal(samples)

    async def attend(self, run_id: str, shard: int) -> None:
        """Look after a shard from now on: the next look reports what its previous owner left unreported."""
        await self.replica(run_id, shard).load()

    async def care(self) -> None:
        """Look after the shards until cancelled."""
        while True:
            await asyncio.sleep(CARE_EVERY_S)
            await self.look()

    async def settled(self) -> None:
        """Wait for background work before the process stops."""
        for replica in list(self._replicas.values()):
            await replica.settled()

    async def look(self) -> None:
        """Look after each shard once."""
        keys = list(self._replicas)
        if len(self._reported_s) > len(keys):
            self._reported_s.clear()
        for start in range(0, len(keys), SHARDS_AT_ONCE):
            await asyncio.gather(*(self._look_at(*key) for key in keys[start : start + SHARDS_AT_ONCE]))
        await self._report_progress()
        if self._metrics is not None:
            self._metrics.shards.set(len(self._replicas))

    async def _report_progress(self) -> None:
        """Report to each core, now and then, how far its samples are: what all shards here have, by one call."""
        grown: dict[str, list[ShardReplica]] = {}
        for (run_id, shard), replica in self._replicas.items():
            if replica.has_grown and self.is_ours(run_id, shard):
                grown.setdefault(run_id, []).append(replica)
        await asyncio.gather(*(self._report_progress_of(run_id, replicas) for run_id, replicas in grown.items()))

    async def _report_progress_of(self, run_id: str, replicas: Sequence[ShardReplica]) -> None:
        try:
            facts, now_s = await self._facts.of(run_id), replicas[0].clock.monotonic_s()
            if now_s - self._reported_s.get(run_id, -math.inf) < facts.progress_every_s:
                return
            self._reported_s[run_id] = now_s
            reports = [report for replica in replicas for report in await replica.progress()]
            for start in range(0, len(reports), REPORTS_AT_ONCE):
                part = reports[start : start + REPORTS_AT_ONCE]
                await self.core.report(run_id, part[0].token_shard, part)
        except PenstockError as error:
            _log.warning("progress of a run not reported", run_id=run_id, error=str(error))

    async def _look_at(self, run_id: str, shard: int) -> None:
        replica = self._replicas.get((run_id, shard))
        if replica is None:
            return
        if self._metrics is not None:
            replica.observe(self._metrics)
        try:
            await self._care_for(run_id, shard, replica)
        except UnknownRunError:
            self._replicas.pop((run_id, shard), None)
        except PenstockError as error:
            _log.warning("token shard not cared for", run_id=run_id, shard=shard, error=str(error))
        except Exception:
            # Otherwise it would silently end the care for all shards.
            _log.exception("token shard not cared for: a fault of the broker", run_id=run_id, shard=shard)

    async def _care_for(self, run_id: str, shard: int, replica: ShardReplica) -> None:
        used_s, is_ours = replica.last_used_s, self.is_ours(run_id, shard)
        # The shards of a closed run have no owner: a process that has a copy deletes what the run dropped at its end.
        if is_ours or await replica.is_closed():
            await replica.care()
            replica.last_used_s = used_s
        is_needed = is_ours and replica.copy is not None and not replica.copy.is_empty
        if not is_needed and replica.clock.monotonic_s() - used_s > IDLE_SHARD_S:
            self._replicas.pop((run_id, shard), None)
