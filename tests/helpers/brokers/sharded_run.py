"""A run with token shards on a store, and as many processes over it as a test wants, each sure to own every shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_array
from services.broker.ingest.token_chunk import ChunkFacts, read_chunk
from services.broker.operations import leasing, submission, token_ends
from services.broker.operations.chunk_rules import Accepted
from services.broker.operations.leasing import GeneratorFacts
from services.broker.records.run_clock import RunClock
from services.broker.records.shard_ids import is_shard_id, shard_id
from services.broker.records.store import Delta, Mark, SampleId, Store
from services.broker.records.stored_sample import read_sample
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.records_pb2 import SampleRecord, SampleTail
from services.broker.runtime.run_replica import RunReplica
from services.broker.shards.run_facts import FactsOfRuns
from services.broker.shards.shard_metrics import ShardMetrics
from services.broker.shards.shard_registry import ShardRegistry
from services.broker.state.run_state import RunState
from tests.helpers.brokers.broker import RUN, chunk, limits, prompt

GENERATOR = "gen-1"
STOP, ABORTED = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_ABORTED
LATE_S = 1e12


class ShardedRun:
    """See the module. The run itself has one copy; it is the shards' core."""

    def __init__(self, store: Store, *, num_shards: int = 3) -> None:
        self.store, self.clock = store, ManualClock()
        self.core = RunReplica(RUN, store=store, clock=self.clock)
        self.is_away = False
        """Whether the core cannot be reached."""
        self.reports: list[TailReport] = []
        """Every report that arrived."""
        self.num_calls = 0
        """Calls by which they arrived."""
        self._num_shards = num_shards
        self._processes: list[ShardRegistry] = []
        self.registry = CollectorRegistry()
        """The metrics of all processes together."""
        self._metrics = ShardMetrics(self.registry)
        self.holders: dict[str, str] = {}
        """The generator of each lease."""
        self._num_leases = 0

    async def open(self, *group_ids: str, **changes: Any) -> None:
        """Open the run and submit groups."""
        policy = broker_pb2.RunPolicy(token_shards=self._num_shards)
        size = {"group_size": 1, "groups_per_step": 8} | changes
        await self.core.open(broker_pb2.OpenRunRequest(run_id=RUN, limits=limits(**size), policy=policy))
        await self.submit(*group_ids, group_size=size["group_size"])

    async def submit(self, *group_ids: str, group_size: int = 1) -> None:
        """Submit groups."""
        prompts = [prompt(name, group_size=group_size) for name in group_ids]
        await self.core.transact(lambda state: submission.submit(state, prompts, retired=(), now_s=1.0))

    def process(self, store: Any = None) -> ShardRegistry:
        """Another process, over a store of its own if one is given."""
        clock = RunClock(self.clock)
        store = store or self.store
        process = ShardRegistry(
            store=store,
            core=self,
            facts=FactsOfRuns(store, self.clock.monotonic_s),
            clock_of=lambda _run_id: clock,
            metrics=self._metrics,
        )
        self._processes.append(process)
        return process

    async def settled(self) -> None:
        """Wait until no process has anything under way."""
        for process in self._processes:
            await process.settled()

    async def report(self, run_id: str, shard: int, reports: Sequence[TailReport]) -> None:
        """As the core."""
        if self.is_away:
            raise ServiceUnavailableError("the core is away")
        self.reports += reports
        self.num_calls += 1
        await self.core.transact(lambda state: token_ends.take_reports(state, shard, reports, 5.0))

    async def lease(self, count: int = 1, generator_id: str = GENERATOR) -> list[broker_pb2.Lease]:
        """Lease samples, as the generator sees them."""
        facts = GeneratorFacts(generator_id=generator_id, policy_version=0, max_context_tokens=128)

        def suffix() -> str:
            self._num_leases += 1
            return f"{self._num_leases:06x}"

        found = await self.core.transact(
            lambda state: leasing.lease(state, facts, max_leases=count, now_s=2.0, make_suffix=suffix)
        )
        self.holders.update((grant.lease_id, generator_id) for grant in found.grants)
        return [
            broker_pb2.Lease(
                lease_id=grant.lease_id,
                key=types_pb2.SampleKey(group_id=grant.sample[0], sample_index=grant.sample[1], attempt=grant.attempt),
                token_shard=grant.token_shard,
            )
            for grant in found.grants
        ]

    async def expire(self) -> None:
        """End every lease."""
        await self.core.transact(lambda state: leasing.expire(state, LATE_S, unbroken_since_s=0.0))

    async def seal(self, process: ShardRegistry, lease: broker_pb2.Lease) -> SampleTail:
        """Ask what is stored under an ended lease, and take the answer."""
        [tail] = await process.seal(RUN, lease.token_shard, [seal_request(lease)])
        key = lease.key
        report = TailReport(group_id=key.group_id, sample_index=key.sample_index, tail=tail)
        await self.core.transact(lambda state: token_ends.take_reports(state, lease.token_shard, [report], 6.0))
        return tail

    def sample(self, sample: SampleId) -> SampleRecord:
        """What the run has of a sample."""
        assert self.core.copy is not None
        return self.core.copy.groups[sample[0]].samples[sample[1]]

    async def tokens(self, lease: broker_pb2.Lease) -> list[int]:
        """The stored tokens of a lease's sample."""
        document = shard_id(RUN, lease.token_shard)
        [parts] = await self.store.chunks(document, [(lease.key.group_id, lease.key.sample_index)])
        return int32_array(read_sample(parts).token_ids, "token_ids").tolist() if parts else []

    async def drop(self, *group_ids: str) -> None:
        """Drop groups."""

        def operation(state: RunState) -> None:
            for group_id in group_ids:
                state.retire(group_id)

        await self.core.transact(operation)


class DyingStore:
    """Loses the answers to commits of token shards, or the commits themselves, as often as it is told."""

    def __init__(self, store: Store, fates: list[str]) -> None:
        self._store, self._fates = store, fates

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        fate = self._fates.pop() if self._fates and is_shard_id(run_id) else ""
        if fate == "before":
            raise ServiceUnavailableError("died before the commit")
        mark = await self._store.commit(run_id, expected, delta)
        if fate == "after":
            raise ServiceUnavailableError("died after the commit")
        return mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def seal_request(lease: broker_pb2.Lease) -> SealRequest:
    """The question what is stored under a lease."""
    return SealRequest(
        group_id=lease.key.group_id,
        sample_index=lease.key.sample_index,
        lease_id=lease.lease_id,
        attempt=lease.key.attempt,
    )


def chunk_of(lease: broker_pb2.Lease, tokens: Sequence[int], **changes: Any) -> ChunkFacts:
    """A chunk as it arrived."""
    return read_chunk(chunk(lease, tokens, **changes))


async def put(
    process: ShardRegistry, lease: broker_pb2.Lease, tokens: Sequence[int], *, holder: str = GENERATOR, **changes: Any
) -> Accepted:
    """Send one chunk."""
    return await process.accept(RUN, lease.token_shard, holder, [chunk_of(lease, tokens, **changes)])


def reasons(accepted: Accepted) -> list[str]:
    """Why chunks were refused."""
    return [error.reason for error in accepted.errors]
