"""Brokers of one store as far as they matter to each other: a place in the roll, and shards that note what is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from penstock.clock import Clock, SystemClock
from penstock.errors import PenstockError
from penstock.network import rpc
from penstock.security import NO_SECURITY, Security
from services.broker.brokers.membership import Membership
from services.broker.brokers.routing import RoutedCore, RoutedShards, Router
from services.broker.brokers.shard_service import ShardService
from services.broker.brokers.sharded_runs import ShardedRuns
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations.chunk_rules import Accepted
from services.broker.records.store import Delta, Store
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.records_pb2 import RunRecord, SampleTail
from tests.helpers.brokers.broker import RUN


@dataclass
class NotedShards:
    """`TokenShards` and `Core` that note every call, and answer as told."""

    calls: list[tuple[str, int, object]] = field(default_factory=list)
    error: PenstockError | None = None
    hangs: bool = False

    async def _note(self, kind: str, shard: int, said: object) -> None:
        self.calls.append((kind, shard, said))
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error

    async def accept(self, run_id: str, shard: int, generator_id: str, chunks: Sequence[ChunkFacts]) -> Accepted:
        """Refuse a chunk at an odd offset, and take others at an offset beyond 100 for repeated."""
        await self._note("accept", shard, (generator_id, list(chunks)))
        return Accepted(
            errors=[chunk.refuse("OFFSET_MISMATCH", 0, "odd") for chunk in chunks if chunk.offset % 2],
            repeated=[chunk for chunk in chunks if chunk.offset > 100 and not chunk.offset % 2],
        )

    async def seal(self, run_id: str, shard: int, samples: Sequence[SealRequest]) -> list[SampleTail]:
        """As many tokens as the sample's index."""
        await self._note("seal", shard, list(samples))
        return [SampleTail(lease_id=each.lease_id, is_sealed=True, num_tokens=each.sample_index) for each in samples]

    async def report(self, run_id: str, shard: int, reports: Sequence[TailReport]) -> None:
        """Do nothing."""
        await self._note("report", shard, list(reports))


@dataclass
class Member:
    """One broker."""

    membership: Membership
    local: NotedShards
    shards: RoutedShards
    core: RoutedCore
    runs: ShardedRuns
    router: Router
    server: rpc.Server
    serves: set[str]


@asynccontextmanager
async def members(
    store: Store, count: int, *, security: Security = NO_SECURITY, clock: Clock | None = None, num_shards: int = 12
) -> AsyncIterator[list[Member]]:
    """So many brokers that have all answered the roll, and an open run with shards."""
    run = RunRecord(run_id=RUN)
    run.policy.token_shards = num_shards
    await store.commit(RUN, None, Delta(run=run.SerializeToString()))
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(_member(store, clock or SystemClock(), security)) for _ in range(count)
        ]
        for each in found * 2:
            await each.membership.answer()
        yield found


@asynccontextmanager
async def _member(store: Store, clock: Clock, security: Security) -> AsyncIterator[Member]:
    local, serves = NotedShards(), set[str]()
    service = rpc.service_of(ShardService(local, local))
    server = rpc.Server(listen="127.0.0.1:0", services=[service], security=security)
    address = f"127.0.0.1:{await server.start()}"
    membership = Membership(
        store, name=address, address=address, clock=clock, serves=lambda: (frozenset(serves), frozenset())
    )
    router, runs = Router(membership, security=security, clock=clock), ShardedRuns(store, membership, clock)
    try:
        yield Member(
            membership=membership,
            local=local,
            shards=RoutedShards(local, router, membership, runs),
            core=RoutedCore(local, router, membership),
            runs=runs,
            router=router,
            server=server,
            serves=serves,
        )
    finally:
        await router.close()
        await server.stop(grace_s=0)
