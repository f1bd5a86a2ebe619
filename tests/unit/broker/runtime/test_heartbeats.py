"""Heartbeats of a run's holders: read without waiting for commits, and stored before anything expires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from penstock.errors import ServiceUnavailableError
from penstock.stall_limits import SilenceLimit
from penstock.v1 import broker_pb2
from services.broker.operations import leasing, submission
from services.broker.operations.renewal import Heard
from services.broker.records.run_clock import MOST_BEHIND_S
from services.broker.records.store import Delta, Mark
from services.broker.rules.saturation import AFTER_S, RECOVERY_S, Saturation
from services.broker.runtime import heartbeats
from services.broker.runtime.heartbeats import GeneratorNote
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.runtime.run_registry import expire
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import duration, limits, prompt
from tests.helpers.waiting import until
from tests.unit.broker.builders import facts, suffix

LIFE_S = 4.0


class GatedStore(MemoryStore):
    """Commits wait while `gate` is clear, and fail while it is away."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_waiting = 0
        self.num_commits = 0
        self.is_away = False

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        self.num_waiting += 1
        await self.gate.wait()
        self.num_waiting -= 1
        if self.is_away:
            raise ServiceUnavailableError("the store is away")
        self.num_commits += 1
        return await super().commit(run_id, expected, delta)


class Broker:
    """A run with a lease for each of some generators, and its caretaker's turns, taken by hand."""

    def __init__(self, clock: ManualClock, store: GatedStore, broker: str) -> None:
        self.clock, self.store = clock, store
        self.saturation = Saturation()
        self.replica = RunReplica("run-1", store=store, clock=clock, broker=broker, saturation=self.saturation)
        self.metrics = BrokerMetrics(CollectorRegistry())
        self.silent: list[str] = []

    async def lease(self, *generator_ids: str) -> list[str]:
        """Open the run and lease a sample to each generator."""
        life = duration(LIFE_S)
        request = broker_pb2.OpenRunRequest(run_id="run-1", limits=limits(generation_lease=life, scoring_lease=life))
        await self.replica.open(request)

        def operation(state: RunState) -> list[str]:
            submission.submit(state, [prompt("a"), prompt("b")], retired=(), now_s=self.clock.now_s())
            leased = [
                leasing.lease(
                    state, facts(generator_id=name), max_leases=1, now_s=self.clock.now_s(), make_suffix=suffix
                )
                for name in generator_ids
            ]
            return [grant.lease_id for each in leased for grant in each.grants]

        lease_ids = await self.replica.transact(operation)
        assert len(lease_ids) == len(generator_ids)
        await self.care()
        return lease_ids

    def beat(self, generator_id: str, *lease_ids: str) -> None:
        heard = Heard(holder_id=generator_id, lease_ids=frozenset(lease_ids), heard_s=self.replica.clock.now_s())
        self.replica.heartbeats.note(GeneratorNote(heard=heard, on_silent=self._note_silent))

    def _note_silent(self, silent: Sequence[str], _limit: SilenceLimit) -> None:
        self.silent += silent

    async def care(self) -> None:
        """What the caretaker does for leases in one turn."""
        await self.replica.keep_time()
        await self.replica.poll()
        await expire(self.replica, self.metrics)

    async def pass_time(self, seconds: float, *others: Broker) -> None:
        """Turns of this broker and others, four a second."""
        for _ in range(round(4 * seconds)):
            self.clock.advance(0.25)
            for broker in (self, *others):
                await broker.care()

    def held(self) -> set[str]:
        """The leases that are held."""
        copy = self.replica.copy
        assert copy is not None
        return {lease_id for held in copy.generation_leases.values() for lease_id in held}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> GatedStore:
    return GatedStore(clock)


async def test_heartbeats_are_taken_while_a_commit_takes_long_and_stored_together(
    clock: ManualClock, store: GatedStore
) -> None:
    broker = Broker(clock, store, "a")
    one, two = await broker.lease("gen-1", "gen-2")
    clock.advance(0.6 * LIFE_S)
    store.gate.clear()
    num_commits = store.num_commits
    broker.beat("gen-1", one)
    await until(lambda: store.num_waiting == 1)
    for _ in range(100):
        broker.beat("gen-1", one)
        broker.beat("gen-2", two)
    store.gate.set()
    await until(lambda: store.num_commits == num_commits + 2)
    await broker.pass_time(0.6 * LIFE_S)
    assert broker.held() == {one, two}
    assert store.num_commits == num_commits + 2


async def test_what_was_read_is_renewed_before_anything_expires(
    clock: ManualClock, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(clock, store, "a")
    one, _two = await broker.lease("gen-1", "gen-2")
    # Its commits are paced: the next one comes too late.
    monkeypatch.setattr(heartbeats, "PACE_S", 3600.0)
    broker.beat("gen-1", one)
    broker.replica.heartbeats.next_turn()
    await until(broker.replica.heartbeats.next_turn)
    await broker.pass_time(LIFE_S - 0.25)
    clock.advance(0.25)
    broker.beat("gen-1", one)
    await broker.care()
    assert broker.held() == {one}
    await broker.pass_time(LIFE_S)
    assert broker.held() == set()


async def test_another_broker_ends_no_lease_whose_renewal_cannot_be_stored(
    clock: ManualClock, store: GatedStore
) -> None:
    broker, other = Broker(clock, store, "a"), Broker(clock, GatedStore(clock), "b")
    other.store._runs = store._runs
    other.replica.store = other.store
    [one] = await broker.lease("gen-1")
    await other.replica.transact(lambda state: None)
    with broker.replica.listening():
        await broker.pass_time(1.0, other)
        store.is_away = True
        clock.advance(LIFE_S / 2)
        await broker.replica.keep_time()
        broker.beat("gen-1", one)
        for _ in range(round(8 * LIFE_S)):
            clock.advance(0.25)
            with pytest.raises(ServiceUnavailableError):
                await broker.care()
            await other.care()
        assert other.held() == {one}
        store.is_away = False
        await broker.pass_time(LIFE_S / 2, other)
        broker.beat("gen-1", one)
        await broker.pass_time(LIFE_S / 2, other)
        assert other.held() == {one}
        # Silent from now on, with every broker listening.
        await broker.pass_time(2 * LIFE_S, other)
        assert other.held() == set()


@asynccontextmanager
async def starved_and_other(
    clock: ManualClock, store: GatedStore, *generator_ids: str
) -> AsyncIterator[tuple[Broker, Broker, list[str]]]:
    """A broker short of a core, another one, both of one run, and leases of these generators."""
    starved, other = Broker(clock, store, "a"), Broker(clock, store, "b")
    lease_ids = await starved.lease(*generator_ids)
    await other.replica.transact(lambda state: None)
    with starved.replica.listening(), other.replica.listening():
        await starved.pass_time(1.0, other)
        starved.saturation.update(1.0, AFTER_S)
        yield starved, other, lease_ids


async def test_no_broker_ends_leases_while_one_is_short_of_a_core(clock: ManualClock, store: GatedStore) -> None:
    async with starved_and_other(clock, store, "gen-1", "gen-2") as (starved, other, [one, two]):
        # Their streams wait in line, and nobody hears them.
        await starved.pass_time(10 * LIFE_S, other)
        assert starved.held() == other.held() == {one, two}
        assert starved.replica.clock.unbroken_since_s < clock.now_s() - 10 * LIFE_S, "nor is there a gap"
        # One of them is heard as soon as the broker has time to spare, and it is the other one that was gone.
        starved.saturation.update(0.0, RECOVERY_S)
        starved.beat("gen-1", one)
        await starved.pass_time(1.0, other)
        assert starved.held() == other.held() == {one}


async def test_streams_that_all_broke_may_wait_in_line_too(clock: ManualClock, store: GatedStore) -> None:
    starved = Broker(clock, store, "a")
    [one] = await starved.lease("gen-1")
    with starved.replica.listening():
        await starved.pass_time(1.0)
        starved.saturation.update(1.0, AFTER_S)
    await starved.pass_time(10 * LIFE_S)
    assert starved.held() == {one}
    starved.saturation.update(0.0, RECOVERY_S)
    await starved.pass_time(1.0)
    assert not starved.held()


async def test_leases_of_a_dead_generator_end_in_a_broker_that_stays_short_of_a_core(
    clock: ManualClock, store: GatedStore
) -> None:
    async with starved_and_other(clock, store, "gen-1", "gen-2") as (starved, other, [one, two]):
        heard_s = clock.now_s()
        starved.beat("gen-1", one)
        while clock.now_s() < heard_s + MOST_BEHIND_S + LIFE_S - 2.0:
            await starved.pass_time(1.0, other)
            starved.beat("gen-2", two)
            assert one in starved.held()
        await starved.pass_time(3.0, other)
        assert starved.held() == other.held() == {two}


async def test_a_heartbeat_that_is_stored_after_a_later_one_of_another_broker_ends_nothing_earlier(
    clock: ManualClock, store: GatedStore
) -> None:
    broker, other = Broker(clock, store, "a"), Broker(clock, GatedStore(clock), "b")
    other.store._runs = store._runs
    one, two = await broker.lease("gen-1", "gen-1")
    await other.replica.transact(lambda state: None)
    # The generator's stream moves, while the first broker's commit is under way.
    clock.advance(2.5)
    store.gate.clear()
    heard_s = broker.replica.clock.now_s()
    broker.beat("gen-1", one, two)
    await until(lambda: store.num_waiting == 1)
    clock.advance(0.5)
    other.beat("gen-1", one)
    await until(lambda: not other.replica.heartbeats.has_waiting)
    store.gate.set()
    await until(lambda: not broker.replica.heartbeats.has_waiting)
    await other.replica.poll()
    assert broker.replica.num_conflicts == 1
    for replica in (broker.replica, other.replica):
        assert replica.copy is not None
        samples = replica.copy.groups["a"].samples
        ends = {sample.lease_id: replica.copy.lease_end_s(sample) for sample in samples if sample.lease_id}
        assert ends == {one: heard_s + 0.5 + LIFE_S, two: heard_s + LIFE_S}


async def test_heartbeats_of_a_run_that_is_gone_are_forgotten(clock: ManualClock, store: GatedStore) -> None:
    broker = Broker(clock, store, "a")
    broker.beat("gen-1", "1.0.0_1.x")
    assert broker.replica.heartbeats.next_turn(), "it was noted in this turn"
    assert not broker.replica.heartbeats.next_turn()
    await until(broker.replica.heartbeats.next_turn)
