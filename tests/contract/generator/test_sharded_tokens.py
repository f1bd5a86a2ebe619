"""Tokens of shards find their owners, and none is lost or doubled when those change, die, hang or are out of reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from penstock.clients.sample_stream import SampleStream
from penstock.clients.sharding import sharded_tokens
from penstock.clients.sharding.sharded_tokens import ShardedTokens
from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, types_pb2
from tests.helpers.brokers.scripted_shards import ScriptedShardBroker, Shards, shard_brokers
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow

NUM_SAMPLES = 16


class Listener:
    """Notes how a sample ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def settled(self) -> None:
        self.ends.append("settled")

    def refused(self, error: broker_pb2.ChunkError) -> None:
        self.ends.append(error.reason)


class Samples:
    """Samples of every shard by turns, to which tokens are appended all the time."""

    def __init__(self, tokens: ShardedTokens, num_shards: int) -> None:
        self._listeners = [Listener() for _ in range(NUM_SAMPLES)]
        self._streams: list[SampleStream] = [
            tokens.open(
                types_pb2.SampleKey(group_id=f"g{number}"),
                lease_id=f"l{number}",
                offset=0,
                listener=listener,
                token_shard=number % num_shards + 1 if num_shards else 0,
            )
            for number, listener in enumerate(self._listeners)
        ]
        self.num_appended = 0

    async def decode(self) -> None:
        """Append to every sample until cancelled."""
        while True:
            for stream in self._streams:
                stream.append(np.array([self.num_appended], np.int32), np.zeros(1, np.float32), policy_version=0)
            self.num_appended += 1
            await asyncio.sleep(0.002)

    async def finish(self, shards: Shards) -> None:
        """End all of them; every token is stored once, in order."""
        for stream in self._streams:
            stream.finish(types_pb2.FINISH_REASON_STOP)
        await until(lambda: all(listener.ends for listener in self._listeners))
        assert [listener.ends for listener in self._listeners] == [["settled"]] * NUM_SAMPLES
        assert list(shards.tokens.values()) == [list(range(self.num_appended))] * NUM_SAMPLES


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LOOK_EVERY_S": 0.01, "OVERDUE_S": 0.1, "ASK_TIMEOUT_S": 0.2, "RETRY_AFTER_S": 0.2}.items():
        monkeypatch.setattr(sharded_tokens, name, seconds)


@asynccontextmanager
async def decoding(shards: Shards, own: str, *, num_shards: int) -> AsyncIterator[Samples]:
    """A generator at a broker, that decodes throughout; afterwards all is well."""
    async with Connection(own) as connection:
        tokens = ShardedTokens(connection, run_id="r", generator_id="gen-1", flush_interval_s=0.01)
        samples = Samples(tokens, num_shards)
        sending, decoding = asyncio.create_task(tokens.run()), asyncio.create_task(samples.decode())
        try:
            yield samples
            await end(decoding)
            await samples.finish(shards)
        finally:
            await end(sending, decoding)


def shards_of(requests: list[broker_pb2.StreamTokensRequest]) -> set[int]:
    return {chunk.token_shard for request in requests for chunk in request.chunks}


async def takes(broker: ScriptedShardBroker, shards: set[int]) -> None:
    """Wait until a broker gets chunks of exactly these shards."""

    def is_so() -> bool:
        latest = broker.requests[-4:]
        return len(latest) == 4 and shards_of(latest) == shards

    broker.requests.clear()
    await until(is_so)


async def test_each_shard_goes_to_its_owner_and_moves_with_it() -> None:
    async with shard_brokers(3) as (shards, [own, one, other]):
        shards.own(own.address, one.address, other.address)
        async with decoding(shards, own.address, num_shards=3):
            for broker, taken in ((own, {1}), (one, {2}), (other, {3})):
                await takes(broker, taken)
            shards.own(other.address, other.address, one.address)
            for broker, taken in ((other, {1, 2}), (one, {3})):
                await takes(broker, taken)


async def test_an_owner_that_hangs_is_left_for_the_next_one() -> None:
    async with shard_brokers(3) as (shards, [own, one, other]):
        shards.own(one.address)
        async with decoding(shards, own.address, num_shards=1):
            await takes(one, {1})
            one.hangs = True
            await until(lambda: own.num_asked)
            shards.own(other.address)
            await takes(other, {1})


async def test_an_owner_that_dies_is_left_at_once_and_its_tokens_passed_on() -> None:
    async with shard_brokers(2) as (shards, [own, one]):
        shards.own(one.address)
        async with decoding(shards, own.address, num_shards=1):
            await takes(one, {1})
            own.requests.clear()
            assert one.server is not None
            await one.server.stop(grace_s=0)
            await takes(own, {1})
            await until(lambda: own.requests[-1].must_pass_on)


async def test_owners_out_of_reach_are_reached_by_the_own_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_tokens, "CONNECT_TIMEOUT_S", 0.1)
    async with shard_brokers(1) as (shards, [own]):
        shards.own("127.0.0.1:1", own.address)
        async with decoding(shards, own.address, num_shards=2):
            await until(lambda: own.requests and own.requests[-1].must_pass_on)
            await takes(own, {1, 2})


@pytest.mark.parametrize("fault", ["hangs", "is_cut"])
async def test_an_own_broker_that_hangs_or_is_cut_off_is_left_for_the_next_in_the_list(fault: str) -> None:
    async with shard_brokers(2) as (shards, [own, other]):
        shards.own(own.address)
        async with decoding(shards, f"{own.address},{other.address}", num_shards=1):
            await takes(own, {1})
            setattr(own, fault, True)
            shards.own(other.address)
            await takes(other, {1})


async def test_a_map_of_an_older_epoch_and_one_that_is_malformed_are_refused() -> None:
    async with shard_brokers(2) as (shards, [own, one]):
        shards.own(own.address)
        shards.epoch = 10
        async with decoding(shards, own.address, num_shards=1):
            await takes(own, {1})
            shards.own(one.address)
            shards.epoch = 9
            own_requests = len(own.requests)
            await until(lambda: len(own.requests) > own_requests + 5)
            shards.owners, shards.epoch = ["no address"], 11
            own_requests = len(own.requests)
            await until(lambda: len(own.requests) > own_requests + 5)
            assert one.requests == []


async def test_a_run_without_shards_has_one_stream_and_asks_nothing() -> None:
    async with shard_brokers(2) as (shards, [own, one]):
        async with decoding(shards, f"{own.address},{one.address}", num_shards=0):
            await takes(own, {0})
        assert own.num_asked == 0
        assert one.requests == []
