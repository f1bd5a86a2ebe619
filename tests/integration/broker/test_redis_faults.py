"""What a real Redis says when it cannot: named, counted, said once; nothing is lost, and it comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from penstock.errors import ServiceUnavailableError
from services.broker.records.store import Delta
from services.broker.storage.redis import redis_connection
from services.broker.storage.redis.redis_connection import RedisConnection
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.brokers.broker import RunningBroker, eventually, prompt, serving
from tests.helpers.proxies.tcp_proxy import proxy_to
from tests.helpers.stores.redis_server import RedisProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path, is_persistent=True)
    process.start()
    yield process
    process.kill()


class Bench:
    """A broker on a real Redis, what it counted, and what it said."""

    def __init__(self, broker: RunningBroker, faults: Counter[str], said: list[Any]) -> None:
        self.broker, self.faults, self._said = broker, faults, said

    def said(self, event: str) -> int:
        """How often it logged this."""
        return sum(entry["event"] == event for entry in self._said)

    async def is_healthy(self) -> bool:
        """What its health says."""
        request = health_pb2.HealthCheckRequest(service="penstock.v1.BrokerService")
        response = await health_pb2_grpc.HealthStub(self.broker.channel).Check(request, timeout=5)
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def is_ill(self) -> bool:
        """The contrary."""
        return not await self.is_healthy()

    async def submit_until_stored(self, group_id: str) -> None:
        """As clients do: again, until it is stored."""

        async def is_stored() -> bool:
            try:
                return not (await self.broker.submit(prompt(group_id))).errors
            except ServiceUnavailableError:
                return False

        await eventually(is_stored)


@asynccontextmanager
async def bench(url: str) -> AsyncIterator[Bench]:
    faults: Counter[str] = Counter()
    store = RedisStore.from_url(url, on_fault=lambda kind: faults.update([kind]))
    with structlog.testing.capture_logs() as said:
        async with serving(store) as broker:
            await broker.open(max_queued_groups=1000)
            await broker.submit(prompt("before"))
            yield Bench(broker, faults, said)
    await store.close()


async def _goes_through(
    server: RedisProcess,
    *,
    fault: str,
    words: str,
    break_it: Callable[[], Awaitable[None]],
    mend_it: Callable[[], Awaitable[None]],
) -> None:
    """A Redis that takes no writes for a while: refused in words, reads go on, health follows, nothing is lost."""
    async with bench(server.url) as running:
        await break_it()
        with pytest.raises(ServiceUnavailableError, match=words) as caught:
            await running.broker.submit(prompt("meanwhile"))
        assert caught.value.metadata["redis_fault"] == fault
        await eventually(running.is_ill)
        assert (await running.broker.audit()).submitted == 2
        for number in range(5):
            # One after the other: together they might be one commit, and one fault.
            await _refused(running, f"more-{number}")
        assert running.faults[fault] >= 6
        assert running.said("redis is away") == 1
        await mend_it()
        await eventually(running.is_healthy)
        assert (await running.broker.submit(prompt("meanwhile"))).num_queued_groups == 2
        assert (await running.broker.audit()).submitted == 4
        assert running.said("redis works again") == 1


async def _refused(running: Bench, group_id: str) -> None:
    with pytest.raises(ServiceUnavailableError):
        await running.broker.submit(prompt(group_id))


async def test_without_memory_writes_are_refused_and_reads_go_on(server: RedisProcess) -> None:
    async def fill() -> None:
        server.command(
            "CONFIG",
            "SET",
            "maxmemory",
            1_000_000,
        )

    async def make_room() -> None:
        server.command("CONFIG", "SET", "maxmemory", 0)

    server.command("SET", "ballast", b"x" * 2_000_000)
    await _goes_through(server, fault="out_of_memory", words="raise its maxmemory", break_it=fill, mend_it=make_room)


async def test_a_replica_is_recognised_and_reads_go_on(server: RedisProcess) -> None:
    async def demote() -> None:
        server.command("REPLICAOF", "127.0.0.1", 1)

    async def promote() -> None:
        server.command("REPLICAOF", "NO", "ONE")

    await _goes_through(server, fault="read_only", words="name the master", break_it=demote, mend_it=promote)


async def test_a_redis_that_cannot_save_is_recognised_and_reads_go_on(server: RedisProcess) -> None:
    in_its_way = server.folder / "dump.rdb"

    async def lose_disk() -> None:
        in_its_way.mkdir()
        server.command("CONFIG", "SET", "save", "3600 1")
        await saves("err")

    async def mend_disk() -> None:
        in_its_way.rmdir()
        await saves("ok")

    async def saves(outcome: str) -> None:
        server.command("BGSAVE")

        async def has_ended() -> bool:
            return bool(server.command("INFO", "persistence")["rdb_last_bgsave_status"] == outcome)

        await eventually(has_ended)

    await _goes_through(
        server, fault="not_persisted", words="cannot write to its disk", break_it=lose_disk, mend_it=mend_disk
    )


async def test_scripts_that_redis_forgot_are_sent_again(server: RedisProcess) -> None:
    async with bench(server.url) as running:
        server.command("SCRIPT", "FLUSH")
        await running.broker.submit(prompt("after"))
        assert (await running.broker.audit()).submitted == 4
        assert not running.faults


async def test_a_redis_that_loads_is_waited_for(server: RedisProcess) -> None:
    async with bench(server.url) as running:
        # It looks at its clients after each thousand keys or so.
        for number in range(12):
            server.command("EVAL", "for i = 1, 1000 do redis.call('SET', KEYS[1] .. i, i) end", 1, f"junk-{number}-")
        server.kill()
        server.settings = ("--key-load-delay", "500")
        server.launch()

        async def loads() -> bool:
            with pytest.raises(ServiceUnavailableError):
                await running.broker.submit(prompt("meanwhile"))
            return running.faults["loading"] > 0

        await eventually(loads)
        await running.submit_until_stored("after")
        assert (await running.broker.audit()).submitted in (4, 6)


async def test_a_slow_redis_is_waited_for_and_one_that_hangs_is_not(
    server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_connection, "ATTEMPT_TIMEOUT_S", 1.0)
    async with bench(server.url) as running:
        server.command("CLIENT", "PAUSE", 400)
        assert (await running.broker.submit(prompt("slow"))).num_queued_groups == 2
        assert not running.faults
        server.pause()
        try:
            with pytest.raises(ServiceUnavailableError, match="hangs or is overloaded"):
                await running.broker.submit(prompt("hanging"))
            await eventually(running.is_ill)
        finally:
            server.resume()
        # The commit may have arrived all the same: it counts once, whoever asks again.
        await running.submit_until_stored("hanging")
        await running.submit_until_stored("hanging")
        await eventually(running.is_healthy)
        assert (await running.broker.audit()).submitted == 6


async def test_a_long_outage_costs_few_connections_however_many_call(server: RedisProcess) -> None:
    async with proxy_to(server.port) as proxy, bench(f"redis://{proxy.address}/0") as running:
        proxy.is_refusing = True
        proxy.cut()
        await eventually(running.is_ill)
        before = proxy.num_connects
        for _ in range(11):
            await asyncio.gather(*(_refused(running, "x") for _ in range(10)))
        assert proxy.num_connects - before < 30
        assert running.said("redis is away") == 1
        proxy.heal()
        await eventually(running.is_healthy)
        await running.submit_until_stored("after")


async def test_an_answer_that_got_lost_is_asked_for_again_and_nothing_happens_twice(server: RedisProcess) -> None:
    class Twice(RedisConnection):
        """Loses every first answer."""

        async def write(self, operation: Callable[[Redis], Awaitable[Any]]) -> Any:
            await super().write(operation)
            return await super().write(operation)

    store = RedisStore(Twice.from_url(server.url))
    first = await store.commit("r", None, Delta(run=b"1", chunks=[(("a", 0), b"x")]))
    second = await store.commit("r", first, Delta(run=b"2", chunks=[(("a", 0), b"y")]))
    assert (first.revision, second.revision) == (1, 2)
    assert await store.chunks("r", [("a", 0)]) == [[b"x", b"y"]]
    await store.close()


async def test_connections_that_broke_while_idle_cost_no_call(server: RedisProcess) -> None:
    async with bench(server.url) as running:
        await asyncio.gather(*(running.broker.submit(prompt(f"g{number}")) for number in range(10)))
        server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await running.broker.submit(prompt("after"))
        assert (await running.broker.audit()).submitted == 24
        assert running.said("redis is away") == 0
