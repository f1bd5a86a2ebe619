"""Clocks an hour apart or stepped, machines and stores that sleep: no lease ends whose holder beats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.v1 import broker_pb2
from tests.helpers.brokers.broker import (
    Duplex,
    Generator,
    RunningBroker,
    Worker,
    chunk,
    duration,
    eventually,
    prompt,
    serving,
)
from tests.helpers.stores.redis_server import RedisProcess
from tests.helpers.stores.stepped_redis import OFFSET_KEY, stepped_store

pytestmark = pytest.mark.slow
LIFE_S = 3.0
BEATS_A_LIFE = 12
HOUR_S = 3600.0


class SteppedClock(SystemClock):
    """The clock of a machine whose wall time is off and may be stepped, and that may sleep."""

    def __init__(self, offset_s: float = 0.0) -> None:
        self.offset_s = offset_s
        self.uncounted_s = 0.0
        """Time it slept that its monotonic clock knows nothing of."""

    def now_s(self) -> float:
        """See `Clock`."""
        return time.time() + self.offset_s

    def monotonic_s(self) -> float:
        """See `Clock`."""
        return time.monotonic() - self.uncounted_s


@asynccontextmanager
async def brokers(redis: RedisProcess, *clocks: SteppedClock) -> AsyncIterator[list[RunningBroker]]:
    """One over each clock, all of which look after one run; leases last LIFE_S."""
    if not clocks:
        yield []
        return
    store = stepped_store(redis.url)
    try:
        async with serving(store, clock=clocks[0]) as first:
            await first.open(generation_lease=duration(LIFE_S), scoring_lease=duration(LIFE_S))
            async with brokers(redis, *clocks[1:]) as others:
                yield [first, *others]
    finally:
        await store.close()


def step_redis_clock(redis: RedisProcess, seconds: float) -> None:
    """As if the machine of Redis had been set to another time, or replaced by one that shows it."""
    redis.command("INCRBY", OFFSET_KEY, round(seconds * 1e6))


def num_expired(brokers: list[RunningBroker]) -> float:
    """Leases that any of the brokers took back."""
    registries = [broker.run_registry.metrics.registry for broker in brokers]
    kinds = ("generation", "scoring")
    values = [
        registry.get_sample_value("penstock_broker_leases_expired_total", {"kind": kind})
        for registry in registries
        for kind in kinds
    ]
    return sum(value or 0.0 for value in values)


async def one_lease(broker: RunningBroker) -> tuple[Generator, broker_pb2.Lease]:
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=1)
    [lease] = await generator.leases(1)
    return generator, lease


async def beat_for(generator: Generator, lease: broker_pb2.Lease, num_lives: float) -> None:
    for _ in range(round(num_lives * BEATS_A_LIFE)):
        generator.beat(active=[lease.lease_id])
        await asyncio.sleep(LIFE_S / BEATS_A_LIFE)


async def still_takes_tokens(generator: Generator, lease: broker_pb2.Lease) -> bool:
    # A token stream on which nothing comes for long is ended.
    generator.tokens = Duplex(generator.stub.StreamTokens)
    return await generator.put(chunk(lease, [7])) == []


@pytest.mark.parametrize("ahead_s", [HOUR_S, pytest.param(-HOUR_S, marks=pytest.mark.grid), 0.6 * LIFE_S])
async def test_brokers_of_different_times_end_no_lease_of_each_other(redis: RedisProcess, ahead_s: float) -> None:
    async with brokers(redis, SteppedClock(), SteppedClock(ahead_s)) as running:
        generator, lease = await one_lease(running[0])
        await beat_for(generator, lease, 2.0)
        assert num_expired(running) == 0
        assert await still_takes_tokens(generator, lease)
        # A holder that is gone is not waited for, whichever broker notices.
        generator.stream.call.cancel()
        other = Generator.connect(running[1].channel, "gen-2")
        other.beat(credits=2)
        again = await other.leases(2)
        assert [len(lease.prefix_token_ids) for lease in again] in ([0, 4], [4, 0])


async def test_scoring_leases_do_not_depend_on_brokers_clocks_either(redis: RedisProcess) -> None:
    async with brokers(redis, SteppedClock(), SteppedClock(HOUR_S)) as running:
        generator, lease = await one_lease(running[1])
        await generator.finish([lease])
        worker = Worker.connect(running[0].channel)
        [scoring] = await worker.leases(1)
        assert scoring.lease_duration.seconds == lease.lease_duration.seconds == LIFE_S
        for _ in range(2 * BEATS_A_LIFE):
            worker.stream.send(broker_pb2.StreamScoringRequest(active_lease_ids=[scoring.lease_id]))
            await asyncio.sleep(LIFE_S / BEATS_A_LIFE)
        assert num_expired(running) == 0


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((60.0, -60.0), marks=pytest.mark.grid),
        (-60.0, 60.0),
        pytest.param((HOUR_S, -HOUR_S), marks=pytest.mark.grid),
    ],
)
async def test_wall_clocks_that_are_stepped_end_no_lease(redis: RedisProcess, steps: tuple[float, ...]) -> None:
    clock = SteppedClock()
    async with brokers(redis, clock) as running:
        generator, lease = await one_lease(running[0])
        for seconds in steps:
            clock.offset_s += seconds
            await beat_for(generator, lease, 0.5)
            # A master on a machine of another time takes over; then the first one again.
            step_redis_clock(redis, seconds)
            await beat_for(generator, lease, 1.0)
        assert num_expired(running) == 0
        assert await still_takes_tokens(generator, lease)
        # And the clock goes on: who is silent loses the lease.
        await eventually(lambda: has_expired(running))


async def has_expired(running: list[RunningBroker]) -> bool:
    return num_expired(running) > 0


@pytest.mark.parametrize("is_counted", [True, False], ids=["monotonic-goes-on", "monotonic-stands-still"])
async def test_a_broker_that_slept_hears_what_came_meanwhile_before_it_ends_leases(
    redis: RedisProcess, is_counted: bool
) -> None:
    clock = SteppedClock()
    async with brokers(redis, clock) as running:
        generator, lease = await one_lease(running[0])
        asleep_s = 2 * LIFE_S
        # Nothing of this process runs, Redis does.
        time.sleep(asleep_s)  # noqa: ASYNC251 -- that is the point
        clock.uncounted_s += 0.0 if is_counted else asleep_s
        # Others' work comes before the first beat that waited in a socket.
        await asyncio.sleep(LIFE_S / 3)
        await beat_for(generator, lease, 1.5)
        assert num_expired(running) == 0
        assert await still_takes_tokens(generator, lease)


async def test_a_store_that_was_away_leaves_leases_a_full_life(redis: RedisProcess) -> None:
    async with brokers(redis, SteppedClock()) as running:
        generator, lease = await one_lease(running[0])
        redis.pause()
        await asyncio.sleep(3 * LIFE_S)
        redis.resume()
        await eventually(answers(running[0]))
        back_s = time.monotonic()
        # Its stream may have ended with an error; it comes back as a generator does, before a life is over.
        generator = Generator.connect(running[0].channel)
        generator.beat(active=[lease.lease_id])
        assert time.monotonic() - back_s < LIFE_S / 2, "the machine is too slow for this test"
        await beat_for(generator, lease, 2.0)
        assert num_expired(running) == 0
        assert await still_takes_tokens(generator, lease)


def answers(broker: RunningBroker) -> Callable[[], object]:
    """Whether it reads and writes again."""

    async def is_there() -> bool:
        try:
            await broker.submit(prompt("b"))
        except PenstockError:
            return False
        return True

    return is_there
