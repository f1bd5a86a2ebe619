"""A broker with three times the tokens that it can carry at its generators' own flush interval."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from penstock.clients.leases import LeaseSession
from penstock.clients.sample_stream import SampleStream
from penstock.clients.tokens import TokenSession
from penstock.flush_interval import asked_s
from penstock.process.tasks import end
from penstock.v1 import broker_pb2
from services.broker import load_watch
from services.broker.records.store import Delta, Mark
from services.broker.rules.flush_pacing import SHORTEST_S
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RUN, RunningBroker, duration, prompt, serving
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow

NUM_GENERATORS, NUM_SLOTS = 2, 4
OVERLOAD = 3
CHUNK_S = OVERLOAD * SHORTEST_S / (NUM_GENERATORS * NUM_SLOTS)
"""Time that the store takes for a chunk."""
LEASE_S = 3.0


class SlowStore(MemoryStore):
    """Takes its time for each chunk, one commit after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk_s = CHUNK_S
        self.num_chunks = 0

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        await asyncio.sleep(self.chunk_s * len(delta.chunks))
        self.num_chunks += len(delta.chunks)
        return await super().commit(run_id, expected, delta)


class _Generator:
    """A generator that decodes nothing: its tokens are made up."""

    def __init__(self, broker: RunningBroker, number: int) -> None:
        hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id=f"gen-{number}", max_context_tokens=1 << 16)
        self.tokens = TokenSession(
            broker.connection, run_id=RUN, generator_id=hello.generator_id, flush_interval_s=SHORTEST_S
        )
        self.leases = LeaseSession(broker.connection, hello=hello, handler=self)
        self.streams: dict[str, SampleStream] = {}
        self.lost: list[str] = []
        self.is_decoding = True

    def num_free_slots(self) -> int:
        return NUM_SLOTS - len(self.streams)

    def beat(self) -> broker_pb2.GeneratorBeat:
        return broker_pb2.GeneratorBeat(active_lease_ids=list(self.streams))

    def lease(self, lease: broker_pb2.Lease) -> None:
        self.streams[lease.lease_id] = self.tokens.open(lease.key, lease_id=lease.lease_id, offset=0, listener=self)
        self.leases.notify()

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        self.lost.append(revocation.reason)

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        """There is no trainer."""

    def run_closed(self) -> None:
        self.lost.append("closed")

    def settled(self) -> None:
        """No sample ends."""

    def refused(self, error: broker_pb2.ChunkError) -> None:
        self.lost.append(error.reason)

    async def decode(self) -> None:
        """A token of each sample, again and again, as the buffer has room."""
        while self.is_decoding:
            await self.tokens.wait_for_room()
            for stream in self.streams.values():
                stream.append(np.array([7], np.int32), np.array([-0.5], np.float32), policy_version=0)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def generating(broker: RunningBroker) -> AsyncIterator[list[_Generator]]:
    """Generators that hold all their leases and decode."""
    generators = [_Generator(broker, number) for number in range(NUM_GENERATORS)]
    tasks = [asyncio.create_task(work) for each in generators for work in (each.leases.run(), each.tokens.run())]
    try:
        await until(lambda: all(len(generator.streams) == NUM_SLOTS for generator in generators))
        decoding = [asyncio.create_task(generator.decode()) for generator in generators]
        tasks += decoding
        yield generators
        for generator in generators:
            generator.is_decoding = False
        await asyncio.gather(*decoding)
        for generator in generators:
            assert await generator.tokens.flush(timeout_s=10.0)
    finally:
        await end(*tasks)


async def test_it_asks_for_larger_chunks_and_carries_all_until_it_can_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_watch, "UPDATE_EVERY_S", 0.03)
    store, registry = SlowStore(), CollectorRegistry()
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(serving(store, registry=registry))
        core = broker.run_registry
        # Only the store is slow here: how much this process works depends on what runs beside it.
        watching = load_watch.watch_load(
            core.flush_interval,
            core.heartbeat_interval,
            core.saturation,
            core.metrics,
            core.clock,
            busy_s=lambda: 0.0,
        )
        watch = asyncio.create_task(watching)
        stack.push_async_callback(end, watch)
        await broker.open(
            generation_lease=duration(LEASE_S),
            groups_per_step=NUM_GENERATORS,
            group_size=NUM_SLOTS,
            max_completion_tokens=1 << 16,
        )
        await broker.submit(*(prompt(f"group-{number}", group_size=NUM_SLOTS) for number in range(NUM_GENERATORS)))
        async with generating(broker) as generators:
            await _raised_and_lowered(broker, store, generators)
        for generator in generators:
            assert generator.lost == []
        num_stored = sum(generator.tokens.num_tokens_stored for generator in generators)
        assert num_stored == sum(stream.num_tokens for each in generators for stream in each.streams.values())
        assert num_stored > OVERLOAD * store.num_chunks
    assert registry.get_sample_value("penstock_broker_leases_expired_total", {"kind": "generation"}) == 0


async def _raised_and_lowered(broker: RunningBroker, store: SlowStore, generators: list[_Generator]) -> None:
    """Let a lease's life pass while the store is slow, then until all is as it was while it is not."""
    await until(lambda: all(each.tokens.flush_interval_s > 2 * SHORTEST_S for each in generators))
    run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    assert asked_s(run.flush_interval) > 2 * SHORTEST_S
    clock = broker.run_registry.clock
    raised_s = clock.monotonic_s()
    await until(lambda: clock.monotonic_s() - raised_s > LEASE_S, timeout_s=2 * LEASE_S)
    store.chunk_s = 0.0
    await until(lambda: all(each.tokens.flush_interval_s == SHORTEST_S for each in generators))
