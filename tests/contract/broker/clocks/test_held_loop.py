"""A broker whose event loop is held, or whose process is stopped: no lease ends whose holder beats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.errors import PenstockError
from penstock.network import rpc
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, broker_pb2_grpc
from services.broker.records.run_clock import BROKER_LIFE_S
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.broker_model.profile import IS_LONG
from tests.helpers.brokers.broker import (
    RUN,
    Duplex,
    Generator,
    RunningBroker,
    Worker,
    chunk,
    duration,
    eventually,
    prompt,
    result,
    serving,
)
from tests.helpers.brokers.held_broker import HeldBroker, held_broker
from tests.helpers.ports import free_port
from tests.helpers.stores.redis_server import RedisProcess
from tests.helpers.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
LONG_ONLY = pytest.mark.skipif(not IS_LONG, reason="takes a minute; PENSTOCK_HYPOTHESIS=long runs it")
TIMES_S = [(2.0, 7.0), pytest.param(15.0, 30.0, marks=LONG_ONLY)]
"""How long leases last, and how long the broker is held."""
BEATS_A_LIFE = 10
NOTHING_HELD = broker_pb2.StreamLeasesRequest(beat=broker_pb2.GeneratorBeat())


@asynccontextmanager
async def pair(
    redis: RedisProcess, folder: Path, life_s: float
) -> AsyncIterator[tuple[HeldBroker, RunningBroker, grpc.aio.Channel]]:
    """A broker to be held, another one, both of one run, and a channel to the first."""
    store = RedisStore.from_url(redis.url)
    with held_broker(folder, redis.url, free_port()) as held:
        async with serving(store) as other, rpc.open_channel(held.address) as channel:
            await other.open(generation_lease=duration(life_s), scoring_lease=duration(life_s))
            await eventually(is_serving(channel), timeout_s=60.0)
            yield held, other, channel
    await store.close()


def is_serving(channel: grpc.aio.Channel) -> Callable[[], Any]:
    async def ask() -> bool:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        with suppress(PenstockError):
            await rpc.call(stub.GetRun, broker_pb2.GetRunRequest(run_id=RUN), peer="broker")
            return True
        return False

    return ask


@asynccontextmanager
async def beating(connect: Callable[[], Duplex], beat: Any, every_s: float) -> AsyncIterator[None]:
    """Inside the block a holder beats, and connects again when its stream ends, as clients do."""

    async def beat_on() -> None:
        while True:
            stream = connect()
            listening = asyncio.create_task(listen(stream))
            while not listening.done():
                stream.send(beat)
                await asyncio.sleep(every_s)

    async def listen(stream: Duplex) -> None:
        with suppress(grpc.aio.AioRpcError):
            while await stream.call.read() is not grpc.aio.EOF:
                pass

    task = asyncio.create_task(beat_on())
    try:
        yield
    finally:
        await end(task)


async def pass_time(broker: RunningBroker, seconds: float) -> None:
    """Wait until so much time has passed in the run."""
    clock = broker.run_registry.replica(RUN).clock
    end_s = clock.now_s() + seconds
    await until(lambda: clock.now_s() >= end_s, timeout_s=seconds + 30.0)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["held", "stopped"])
@pytest.mark.parametrize(("life_s", "held_s"), TIMES_S)
async def test_another_broker_waits_for_what_a_held_one_has_not_read(
    redis: RedisProcess, tmp_path: Path, is_stopped: bool, life_s: float, held_s: float
) -> None:
    async with pair(redis, tmp_path, life_s) as (held, other, channel):
        await other.submit(prompt("a", group_size=2))
        generator = Generator.connect(channel)
        generator.beat(credits=2)
        generation, finished = await generator.leases(2)
        await generator.finish([finished])
        worker = Worker.connect(channel)
        [scoring] = await worker.leases(1)
        beat = broker_pb2.GeneratorBeat(credit_total=2, active_lease_ids=[generation.lease_id])
        renewal = broker_pb2.StreamScoringRequest(active_lease_ids=[scoring.lease_id])
        async with (
            beating(
                lambda: Generator.connect(channel).stream,
                broker_pb2.StreamLeasesRequest(beat=beat),
                life_s / BEATS_A_LIFE,
            ),
            beating(lambda: Worker.connect(channel).stream, renewal, life_s / BEATS_A_LIFE),
            # The other broker has a stream of the run as well, without which it would care for the run only a while.
            beating(lambda: Generator.connect(other.channel, "gen-3").stream, NOTHING_HELD, life_s / BEATS_A_LIFE),
        ):
            await pass_time(other, life_s)
            with held.stopped() if is_stopped else held.held():
                await until(lambda: is_stopped or held.is_held)
                await pass_time(other, held_s)
            await eventually(is_serving(channel))
            # What is not renewed now ends now.
            await pass_time(other, 3 * life_s)
            again = Generator.connect(channel)
            assert await again.put(chunk(generation, [7])) == []
            receipt = await Worker.connect(channel).report(result(scoring))
            assert list(receipt.accepted_lease_ids) == [scoring.lease_id]
        # A holder that is silent while all brokers listen is not waited for.
        generator.stream.call.cancel()
        heir = Generator.connect(other.channel, "gen-2")
        heir.beat(credits=1)
        [lease] = await heir.leases(1)
        assert lease.prefix_token_ids


@pytest.mark.parametrize("goes_to", ["restarted", "other"])
async def test_leases_end_although_a_broker_of_the_run_was_killed(
    redis: RedisProcess, tmp_path: Path, goes_to: str
) -> None:
    async with pair(redis, tmp_path, 2.0) as (held, other, channel):
        await other.submit(prompt("a", group_size=2))
        generator = Generator.connect(channel)
        generator.beat(credits=2)
        await generator.leases(2)
        held.process.kill()
        clock = other.run_registry.replica(RUN).clock
        killed_s = clock.now_s()
        with held_broker(tmp_path, redis.url, int(held.address.rpartition(":")[2])) as restarted:
            assert restarted.address == held.address
            # It takes the place of its predecessor, whether or not a stream comes back to it.
            async with rpc.open_channel(restarted.address) as again:
                await eventually(is_serving(again), timeout_s=60.0)
                heir = Generator.connect(again if goes_to == "restarted" else other.channel, "gen-2")
                heir.beat(credits=2)
                assert len(await heir.leases(2)) == 2
                assert clock.now_s() - killed_s < BROKER_LIFE_S
