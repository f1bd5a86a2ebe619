"""The broker on a real Redis that is killed, restarted and set back; and brokers that are killed and replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.errors import PenstockError, ServiceUnavailableError
from penstock.v1 import types_pb2
from services.broker.records.store import Store
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    duration,
    eventually,
    prompt,
    serving,
)
from tests.helpers.stores.redis_server import RedisProcess, flush, shared_redis

STOP = types_pb2.FINISH_REASON_STOP


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from shared_redis(Path(tmp_path_factory.mktemp("redis")))


@pytest.fixture
def persistent_redis(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path, is_persistent=True)
    server.start()
    yield server
    server.kill()


async def test_commits_racing_on_one_run_all_happen_once(store: Store) -> None:
    async with serving(store) as one, serving(store) as two:
        await one.open(max_queued_groups=200)
        names = [f"g{number}" for number in range(60)]
        submissions = [(one, two)[number % 2].submit(prompt(name)) for number, name in enumerate(names)]
        await asyncio.gather(*submissions)
        books = await one.audit()
        assert (books.submitted, books.in_flight) == (120, 120)
        assert len(set(one.run_registry.replica(RUN).copy.groups)) == 60  # type: ignore[union-attr]


async def test_a_lease_expires_once_whatever_the_number_of_brokers(store: Store) -> None:
    async with serving(store) as one, serving(store) as two:
        await one.open(generation_lease=duration(0.3), max_leases_per_sample=100)
        await one.submit(prompt("a"))
        lost = Generator.connect(one.channel, "lost")
        lost.beat(credits=2)
        await lost.leases(2)
        for broker in (one, two):
            await broker.audit()
        other = Generator.connect(two.channel, "other")
        other.beat(credits=2)
        leases = await other.leases(2)
        assert {lease.lease_id.split(".")[2] for lease in leases} == {"0_2"}


async def test_everything_survives_a_broker_that_is_replaced(redis_url: str) -> None:
    flush(redis_url)
    store = RedisStore.from_url(redis_url)
    async with serving(store) as first:
        await first.open()
        await first.submit(prompt("a"), prompt("b"))
        generator, worker = Generator.connect(first.channel), Worker.connect(first.channel)
        generator.beat(credits=4)
        leases = await generator.leases(4)
        assert await generator.put(chunk(leases[3], [7])) == []
        await generator.finish(leases[:2])
        [scoring] = await worker.leases(1)
    async with serving(store) as second:
        generator, worker = Generator.connect(second.channel), Worker.connect(second.channel)
        generator.beat(active=[lease.lease_id for lease in leases[2:]])
        assert await generator.put(chunk(leases[2], [7], finish=STOP)) == []
        assert await generator.put(chunk(leases[3], [8], offset=1, finish=STOP)) == []
        books = await second.audit()
        assert dict(books.in_flight_by_state) == {"finished": 3, "scoring": 1}
        await worker.score(3)
        assert scoring.lease_id
    await store.close()


async def _is_healthy(broker: RunningBroker) -> bool:
    request = health_pb2.HealthCheckRequest(service="penstock.v1.BrokerService")
    response = await health_pb2_grpc.HealthStub(broker.channel).Check(request, timeout=5)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def test_without_redis_calls_are_unavailable_and_it_comes_back_by_itself(persistent_redis: RedisProcess) -> None:
    store = RedisStore.from_url(persistent_redis.url)
    async with serving(store) as broker:
        await broker.open()
        await broker.submit(prompt("a"), prompt("b"))
        generator = Generator.connect(broker.channel)
        generator.beat(credits=4)
        leases = await generator.leases(4)
        persistent_redis.kill()
        with pytest.raises(ServiceUnavailableError):
            await broker.submit(prompt("c"))

        async def is_unhealthy() -> bool:
            return not await _is_healthy(broker)

        await eventually(is_unhealthy)
        persistent_redis.start()

        async def is_healthy() -> bool:
            return await _is_healthy(broker)

        await eventually(is_healthy)
        again = Generator.connect(broker.channel)
        again.beat(active=[lease.lease_id for lease in leases])
        await again.finish(leases)
        await Worker.connect(broker.channel).score(4)
        trainer = Trainer.connect(broker.channel)
        groups = await trainer.groups(2)
        await trainer.ack([group.prompt.group_id for group in groups], 1)
        books = await broker.audit()
        assert (books.submitted, books.trained, books.in_flight) == (4, 4, 0)
    await store.close()


async def test_a_redis_that_lost_its_last_commits_is_believed(redis_url: str) -> None:
    """The copy in the broker is ahead of a Redis that came back without its last second: Redis counts."""
    flush(redis_url)
    store = RedisStore.from_url(redis_url)
    async with serving(store) as broker:
        await broker.open()
        await broker.submit(prompt("a"))
        with redis.Redis.from_url(redis_url) as client:
            saved = {key: client.dump(key) for key in client.keys("penstock:*")}
            await broker.submit(prompt("b"))
            client.flushall()
            for key, value in saved.items():
                client.restore(key, 0, value)
        assert (await broker.audit()).submitted == 2
        assert (await broker.submit(prompt("b"))).num_queued_groups == 2
        assert (await broker.audit()).submitted == 4
        generator = Generator.connect(broker.channel)
        generator.beat(credits=4)
        assert {lease.key.group_id for lease in await generator.leases(4)} == {"a", "b"}
    await store.close()


async def test_a_broker_may_start_before_redis(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path)
    store = RedisStore.from_url(server.url)
    async with serving(store) as broker:
        with pytest.raises(PenstockError) as caught:
            await broker.open()
        assert isinstance(caught.value, ServiceUnavailableError)
        assert "Redis is away" in str(caught.value)

        async def is_healthy() -> bool:
            return await _is_healthy(broker)

        async def is_unhealthy() -> bool:
            return not await _is_healthy(broker)

        # It begins as healthy: only its first look at Redis, with its retries, tells.
        await eventually(is_unhealthy)
        server.start()
        try:
            await eventually(is_healthy)
            assert not (await broker.open()).existed
        finally:
            server.kill()
    await store.close()
