"""The caretaker of a process's runs: what befalls one run is not the others', and clocks wait for nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock, SystemClock
from penstock.errors import ServiceUnavailableError
from penstock.process.tasks import end
from penstock.process.time_limits import Wake
from penstock.v1 import broker_pb2
from services.broker.records.run_clock import Reading
from services.broker.runtime import run_registry as run_registry_module
from services.broker.runtime.run_registry import RunRegistry
from services.broker.runtime.run_replica import RunReplica
from services.broker.runtime.stream_listeners import Topic
from services.broker.server import make_run_registry
from services.broker.shards import run_facts
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import limits
from tests.helpers.waiting import until

RUNS = ("a", "b", "c")


class TickStore(MemoryStore):
    """Counts the advances of each run's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ticks: Counter[str] = Counter()

    async def tick(
        self, run_id: str, max_gap_s: float, *, broker: str = "", is_leaving: bool = False, is_behind: bool = False
    ) -> Reading:
        self.num_ticks[run_id] += 1
        return await super().tick(run_id, max_gap_s, broker=broker, is_leaving=is_leaving, is_behind=is_behind)

    async def until_ticks(self, *run_ids: str) -> None:
        """Wait until the clock of each of these runs was advanced some more."""
        self.num_ticks.clear()
        await until(lambda: all(self.num_ticks[run_id] >= 3 for run_id in run_ids))


@asynccontextmanager
async def caring(store: TickStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunRegistry]:
    """A caretaker, and a stream that listens to each run."""
    monkeypatch.setattr(run_registry_module, "POLL_EVERY_S", 0.01)
    run_registry = make_run_registry(store, registry=CollectorRegistry(), clock=SystemClock())
    with ExitStack() as stack:
        for run_id in RUNS:
            replica = run_registry.replica(run_id)
            await replica.open(broker_pb2.OpenRunRequest(run_id=run_id, limits=limits()))
            stack.enter_context(replica.listening())
        task = asyncio.create_task(run_registry.care(_ignore))
        try:
            yield run_registry
            assert not task.done()
        finally:
            await end(task)


def _close(state: RunState) -> None:
    state.run.is_closed = True


async def _ignore(_is_serving: bool) -> None:
    pass


@pytest.mark.parametrize("error", [RuntimeError("a fault"), ServiceUnavailableError("always too late")])
async def test_what_befalls_one_run_is_not_the_others(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TickStore()
    async with caring(store, monkeypatch) as run_registry:
        faulty = run_registry.replica("a")

        async def fail() -> None:
            raise error

        monkeypatch.setattr(faulty, "poll", fail)
        await store.until_ticks(*RUNS)
        monkeypatch.undo()
        await store.until_ticks(*RUNS)


async def test_no_clock_waits_for_a_review_of_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    store, num_reviews = TickStore(), 0
    async with caring(store, monkeypatch) as run_registry:

        async def look(*_: object) -> None:
            nonlocal num_reviews
            num_reviews += 1
            await asyncio.Event().wait()

        monkeypatch.setattr(run_registry.replica("a").dispatcher, "review", look)
        await until(lambda: num_reviews == 1)
        await store.until_ticks(*RUNS)
        assert num_reviews == 1


async def test_an_unused_run_is_unloaded_with_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    async with caring(TickStore(), monkeypatch) as run_registry:
        await run_registry.replica("idle").open(broker_pb2.OpenRunRequest(run_id="idle", limits=limits()))
        registry = run_registry.metrics.registry

        def observed() -> set[str]:
            return {sample.labels.get("run", "") for family in registry.collect() for sample in family.samples} - {""}

        await until(lambda: observed() == {*RUNS, "idle"})
        monkeypatch.setattr(run_registry_module, "IDLE_RUN_S", 0.0)
        await until(lambda: observed() == set(RUNS))


async def test_a_run_that_nobody_looked_after_is_used_with_the_time_and_peers_of_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it is the replica of before, which something refers to, or another."""
    monkeypatch.setattr(run_registry_module, "POLL_EVERY_S", 0.01)
    clock = ManualClock()
    run_registry = make_run_registry(MemoryStore(clock=clock), registry=CollectorRegistry(), clock=clock)
    replica = run_registry.replica("r")
    await replica.open(broker_pb2.OpenRunRequest(run_id="r", limits=limits()))
    hello = broker_pb2.GeneratorHello(run_id="r", generator_id="gen")
    replica.peers.see_generator(hello, broker_pb2.GeneratorBeat())
    task = asyncio.create_task(run_registry.care(_ignore))
    try:
        clock.advance(run_registry_module.IDLE_RUN_S + 1)
        await until(lambda: replica.copy is None and replica.peers.generator("gen") is None)
        assert await replica.store.peers("r"), "what was heard is stored"
        clock.advance(3600.0)
        assert await replica.transact(lambda _state: replica.clock.now_s(), must_verify=False) == clock.now_s()
        assert replica.peers.generator("gen") is None
    finally:
        await end(task)


async def test_a_run_that_another_broker_looks_after_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, end_of_run = TickStore(), Wake()
    async with caring(store, monkeypatch) as run_registry:
        monkeypatch.setattr(run_registry_module, "FOLLOWED_S", 0.0)
        monkeypatch.setattr(run_registry_module, "KEEP_EVERY_S", 0.01)
        monkeypatch.setattr(run_facts, "FACTS_LIFE_S", 0.0)
        replica, other = (run_registry.replica("s"), RunReplica("s", store=store, clock=SystemClock()))
        policy = broker_pb2.RunPolicy(token_shards=2)
        await replica.open(broker_pb2.OpenRunRequest(run_id="s", limits=limits(), policy=policy))
        with replica.kept(), replica.listening(end_of_run, topic=Topic.END):
            with replica.listening():
                run_registry.owns_core = lambda _run_id: False
                await store.until_ticks("s")
                assert replica.copy is not None
            await until(lambda: replica.copy is None)
            await store.until_ticks("s")
            assert not replica.is_closed
            # Others are loaded still: they have no token shards, or streams.
            assert all(run_registry.replica(run_id).copy is not None for run_id in RUNS)
            await other.transact(_close)
            await until(end_of_run.is_set)
            assert replica.is_closed


class TurnStore(TickStore):
    """Notes the turn of the event loop in which the clock of run a is advanced."""

    turn = 0

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[int] = []

    async def tick(
        self, run_id: str, max_gap_s: float, *, broker: str = "", is_leaving: bool = False, is_behind: bool = False
    ) -> Reading:
        if run_id == "a":
            self.turns.append(self.turn)
        return await super().tick(run_id, max_gap_s, broker=broker, is_leaving=is_leaving, is_behind=is_behind)

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def test_what_had_arrived_by_one_advance_of_a_clock_is_read_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a turn of the event loop takes: they are counted."""
    store, num_turns = TurnStore(), 100
    # More than a round takes by itself.
    monkeypatch.setattr(run_registry_module, "TURNS_TO_READ", num_turns)
    async with caring(store, monkeypatch):
        monkeypatch.setattr(run_registry_module, "POLL_EVERY_S", 0.0)
        await store.until_ticks("a")
        store.turns.clear()
        counting = asyncio.create_task(store.count_turns())
        await store.until_ticks("a")
        await end(counting)
    assert len(store.turns) >= 3
    assert min(later - earlier for earlier, later in pairwise(store.turns)) >= num_turns
