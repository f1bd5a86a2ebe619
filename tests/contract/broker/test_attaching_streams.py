"""Streams that attach while the store is slow: they hear of the broker, and it must not lose sight of their run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from services.broker.records.store import Delta, Mark, Snapshot
from services.broker.runtime import run_registry
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams import lease_stream, scoring_stream
from tests.helpers.brokers.broker import Generator, RunningBroker, Trainer, Worker, prompt, serving
from tests.helpers.waiting import until


class _GatedStore(MemoryStore):
    """The data of another store, but who has no copy of a run waits for it until the gate opens."""

    def __init__(self, data: MemoryStore) -> None:
        super().__init__()
        self._runs = data._runs
        self.gate = asyncio.Event()
        self.num_waiting, self.num_loaded, self.num_pings = 0, 0, 0

    async def load(self, run_id: str, since: Mark | None) -> Snapshot | None:
        if since is None:
            self.num_waiting += 1
            await self.gate.wait()
        snapshot = await super().load(run_id, since)
        self.num_loaded += 1
        return snapshot

    async def ping(self) -> None:
        self.num_pings += 1


class _BusyStore(MemoryStore):
    """Commits wait until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_waiting = 0

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        self.num_waiting += 1
        await self.gate.wait()
        return await super().commit(run_id, expected, delta)


async def _lease(channel: grpc.aio.Channel, work: Callable[[], Awaitable[None]]) -> None:
    generator = Generator.connect(channel)
    await work()
    generator.beat(credits=2)
    await generator.leases(2)


async def _score(channel: grpc.aio.Channel, work: Callable[[], Awaitable[None]]) -> None:
    worker = Worker.connect(channel)
    await work()
    await worker.leases(2)


async def _train(channel: grpc.aio.Channel, work: Callable[[], Awaitable[None]]) -> None:
    trainer = Trainer.connect(channel)
    await work()
    await trainer.groups(1)


async def _advance(broker: RunningBroker, role: Callable[..., Awaitable[None]]) -> None:
    """Bring one group, by another broker, to where the role has work."""
    await broker.submit(prompt("a"))
    if role in (_score, _train):
        generator = Generator.connect(broker.channel, "gen-other")
        generator.beat(credits=2)
        await generator.finish(await generator.leases(2))
    if role is _train:
        await Worker.connect(broker.channel, "worker-other").score(2)


@pytest.mark.parametrize("role", [_lease, _score, _train])
async def test_work_reaches_a_stream_that_attached_while_the_store_was_slow(
    role: Callable[..., Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_registry, "POLL_EVERY_S", 0.02)
    data = MemoryStore()
    gated = _GatedStore(data)
    async with serving(data) as fast, serving(gated) as slow:
        await fast.open()

        async def attach_then_make_work() -> None:
            await until(lambda: gated.num_waiting > 0)
            num_pings = gated.num_pings
            await until(lambda: gated.num_pings >= num_pings + 3)
            gated.gate.set()
            # The stream has its copy before there is anything to do: it has to be told.
            await until(lambda: gated.num_loaded > 0)
            await _advance(fast, role)

        await role(slow.channel, attach_then_make_work)


@pytest.mark.parametrize("connect", [Generator.connect, Worker.connect])
async def test_a_stream_hears_of_its_broker_before_the_commits_of_others_are_done(
    connect: Callable[[grpc.aio.Channel], Generator | Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lease_stream, scoring_stream):
        monkeypatch.setattr(module, "MAX_SILENCE_S", 0.05)
    store = _BusyStore()
    async with serving(store) as broker:
        await broker.open()
        store.gate.clear()
        store.num_waiting = 0
        submitting = asyncio.create_task(broker.submit(prompt("a")))
        await until(lambda: store.num_waiting > 0)
        stream = connect(broker.channel).stream
        for _ in range(2):
            assert await stream.receive() is not grpc.aio.EOF
        assert not submitting.done()
        store.gate.set()
        await submitting
