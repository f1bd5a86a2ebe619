"""Owners of token shards that are killed, stopped and cut off from Redis while samples stream through them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from penstock.clients.leases import LeaseSession
from penstock.clients.sample_stream import SampleStream
from penstock.clients.sharding.sharded_tokens import ShardedTokens
from penstock.network.connection import Connection
from penstock.network.rpc import call, open_channel
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import int32_array
from services.broker.operations.leasing import home_shard
from tests.helpers.brokers.broker import RUN, Worker, limits, prompt
from tests.helpers.brokers.broker_process import BrokerProcess
from tests.helpers.proxies.tcp_proxy import TcpProxy
from tests.helpers.stores.redis_server import RedisProcess
from tests.helpers.waiting import until

NUM_GENERATORS, NUM_SLOTS = 4, 16
NUM_SAMPLES = NUM_GENERATORS * NUM_SLOTS
NUM_SHARDS = NUM_GENERATORS
DECODE_EVERY_S = 0.02
TIMEOUT_S = 40.0


class Streaming:
    """A generator that appends a token to each of its samples again and again: its number."""

    def __init__(self, generator_id: str, connection: Connection) -> None:
        hello = broker_pb2.GeneratorHello(
            run_id=RUN, generator_id=generator_id, engine="test", max_context_tokens=1 << 20
        )
        self._leases = LeaseSession(connection, hello=hello, handler=self)
        self._tokens = ShardedTokens(connection, run_id=RUN, generator_id=generator_id, flush_interval_s=0.1)
        self._streams: dict[str, SampleStream] = {}
        self.num_settled = 0
        self.faults: list[str] = []
        """Whatever ends a sample before its time."""
        self._is_over = False

    async def run(self) -> None:
        """Decode until cancelled."""
        async with asyncio.TaskGroup() as group:
            for work in (self._leases.run, self._tokens.run, self._decode):
                group.create_task(work())

    async def _decode(self) -> None:
        while not self._is_over:
            await asyncio.sleep(DECODE_EVERY_S)
            await self._tokens.wait_for_room()
            for stream in self._streams.values():
                stream.append(np.array([stream.num_tokens], np.int32), np.zeros(1, np.float32), policy_version=0)
        for stream in self._streams.values():
            stream.finish(types_pb2.FINISH_REASON_STOP)

    def finish(self) -> None:
        """End every sample."""
        self._is_over = True

    async def gets_on(self) -> None:
        """Wait until everything that is decoded by now is stored, and more."""
        wanted = self.num_decoded + 10 * NUM_SLOTS
        await until(lambda: self._tokens.num_tokens_stored >= wanted, timeout_s=TIMEOUT_S)

    @property
    def num_decoded(self) -> int:
        """Tokens decoded so far."""
        return sum(stream.num_tokens for stream in self._streams.values())

    @property
    def num_samples(self) -> int:
        """Leases so far."""
        return len(self._streams)

    # -- as its session's handler and its samples' listener ------------------------------------------------------------

    def num_free_slots(self) -> int:
        return NUM_SLOTS - len(self._streams)

    def beat(self) -> broker_pb2.GeneratorBeat:
        return broker_pb2.GeneratorBeat(policy_version=0, active_lease_ids=list(self._streams))

    def lease(self, lease: broker_pb2.Lease) -> None:
        self._streams[lease.lease_id] = self._tokens.open(
            lease.key, lease_id=lease.lease_id, offset=0, listener=self, token_shard=lease.token_shard
        )

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        self.faults.append(f"revoked: {revocation.reason}")

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        pass

    def run_closed(self) -> None:
        self.faults.append("closed")

    def settled(self) -> None:
        self.num_settled += 1

    def refused(self, error: broker_pb2.ChunkError) -> None:
        self.faults.append(f"{error.reason}: {error.message}")


@asynccontextmanager
async def four_brokers(folder: Path) -> AsyncIterator[tuple[list[BrokerProcess], list[TcpProxy]]]:
    """Broker processes, each with a way of its own to one Redis."""
    async with AsyncExitStack() as stack:
        redis_process = RedisProcess(folder)
        redis_process.start()
        stack.callback(redis_process.kill)
        links = [TcpProxy(redis_process.port) for _ in range(4)]
        for link in links:
            await link.start()
            stack.push_async_callback(link.stop)
        brokers = [BrokerProcess(f"redis://{link.address}/0") for link in links]
        for broker in brokers:
            stack.callback(broker.kill)
        await asyncio.gather(*(broker.start() for broker in brokers))
        yield brokers, links


def one_of_each_shard() -> list[str]:
    """Generators of which each has another home shard, so that each broker owns what one of them sends."""
    by_shard = {home_shard(f"gen-{number}", NUM_SHARDS): f"gen-{number}" for number in range(100)}
    assert len(by_shard) == NUM_SHARDS
    return list(by_shard.values())


async def submit(stub: broker_pb2_grpc.BrokerServiceStub) -> None:
    """Open the run, and submit what the generators can hold."""
    policy = broker_pb2.RunPolicy(token_shards=NUM_SHARDS, dispatch="fifo")
    size = limits(groups_per_step=NUM_GENERATORS, group_size=NUM_SLOTS, max_completion_tokens=1 << 18)
    await call(stub.OpenRun, broker_pb2.OpenRunRequest(run_id=RUN, limits=size, policy=policy), peer="broker")
    prompts = [prompt(f"g{number}", group_size=NUM_SLOTS) for number in range(NUM_GENERATORS)]
    for each in prompts:
        each.sampling.max_new_tokens = 1 << 18
    await call(stub.SubmitPrompts, broker_pb2.SubmitPromptsRequest(run_id=RUN, prompts=prompts), peer="broker")


async def test_owners_killed_stopped_and_cut_off_lose_and_double_no_token(tmp_path: Path) -> None:
    """All at once, each also some generator's own broker; then two come back, in the midst of what they did."""
    async with four_brokers(tmp_path) as (brokers, links), AsyncExitStack() as stack:
        [stays, killed, held, _], link = brokers, links[3]
        channel = await stack.enter_async_context(open_channel(stays.address))
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        await submit(stub)
        generators = []
        for name, own in zip(one_of_each_shard(), brokers, strict=True):
            targets = ",".join(dict.fromkeys([own.address, stays.address]))
            connection = await stack.enter_async_context(Connection(targets))
            generators.append(Streaming(name, connection))
        running = [asyncio.create_task(generator.run()) for generator in generators]
        stack.push_async_callback(end, *running)
        await until(lambda: sum(each.num_samples for each in generators) == NUM_SAMPLES, timeout_s=TIMEOUT_S)
        await asyncio.gather(*(each.gets_on() for each in generators))
        killed.kill()
        held.hold()
        link.is_refusing = True
        link.cut()
        await asyncio.gather(*(each.gets_on() for each in generators))
        held.let_go()
        link.heal()
        await asyncio.gather(*(each.gets_on() for each in generators))
        for generator in generators:
            generator.finish()
        await until(lambda: sum(each.num_settled for each in generators) == NUM_SAMPLES, timeout_s=TIMEOUT_S)
        assert [fault for each in generators for fault in each.faults] == []
        scored = await Worker.connect(channel).leases(NUM_SAMPLES)
        for lease in scored:
            token_ids = int32_array(lease.item.token_ids, "token_ids").tolist()
            assert token_ids == list(range(len(token_ids)))
        num_tokens = sum(len(lease.item.token_ids) // 4 for lease in scored)
        assert num_tokens == sum(each.num_decoded for each in generators)
        response = await call(stub.AuditRun, broker_pb2.AuditRunRequest(run_id=RUN), peer="broker")
        assert response.audit.balanced
        assert not response.audit.dropped
