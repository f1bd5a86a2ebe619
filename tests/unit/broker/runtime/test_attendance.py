"""Streams that attach make their broker one of those that serve the run, by one advance of the run's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from penstock.clock import ManualClock
from penstock.errors import ServiceUnavailableError
from penstock.stall_limits import SilenceLimit
from penstock.v1 import broker_pb2
from services.broker.operations.renewal import Heard
from services.broker.records.run_clock import Reading
from services.broker.runtime.heartbeats import GeneratorNote
from services.broker.runtime.run_replica import RunReplica
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import limits
from tests.helpers.waiting import until

NUM_STREAMS = 50


class TickStore(MemoryStore):
    """Advances of clocks wait while `gate` is clear, and fail while it is away."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_ticks = 0
        self.is_away = False

    async def tick(
        self, run_id: str, max_gap_s: float, *, broker: str = "", is_leaving: bool = False, is_behind: bool = False
    ) -> Reading:
        self.num_ticks += 1
        await self.gate.wait()
        if self.is_away:
            raise ServiceUnavailableError("the store is away")
        return await super().tick(run_id, max_gap_s, broker=broker, is_leaving=is_leaving, is_behind=is_behind)

    def brokers(self) -> set[str]:
        """Those that serve the run."""
        return set(self._run("run-1").clock._brokers)


@contextmanager
def listening(replica: RunReplica, num_streams: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(num_streams):
            stack.enter_context(replica.listening())
        yield


async def opened(store: TickStore) -> RunReplica:
    replica = RunReplica("run-1", store=store, clock=ManualClock(), broker="a")
    await replica.open(broker_pb2.OpenRunRequest(run_id="run-1", limits=limits()))
    store.num_ticks = 0
    return replica


async def attach(replica: RunReplica, store: TickStore) -> list[BaseException | None]:
    """Attach many streams while the store is slow; returns what each one's call came to."""
    store.gate.clear()
    calls = [asyncio.create_task(replica.attend()) for _ in range(NUM_STREAMS)]
    await until(lambda: store.num_ticks > 0)
    calls += [asyncio.create_task(replica.attend()) for _ in range(NUM_STREAMS)]
    await asyncio.sleep(0)
    store.gate.set()
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_streams_that_attach_at_once_share_one_advance() -> None:
    store = TickStore()
    replica = await opened(store)
    with listening(replica, NUM_STREAMS):
        assert set(await attach(replica, store)) == {None}
        assert (store.num_ticks, store.brokers()) == (1, {"a"})
        await replica.attend()
        assert store.num_ticks == 1


async def test_they_share_its_failure_and_the_next_one_tries_again() -> None:
    store = TickStore()
    replica = await opened(store)
    with listening(replica, NUM_STREAMS):
        store.is_away = True
        found = await attach(replica, store)
        assert {type(error) for error in found} == {ServiceUnavailableError}
        assert (store.num_ticks, store.brokers()) == (1, set())
        store.is_away = False
        assert set(await attach(replica, store)) == {None}
        assert (store.num_ticks, store.brokers()) == (2, {"a"})


@pytest.mark.parametrize("is_idle", [False, True], ids=["no stream listens", "the run is idle"])
async def test_a_stream_that_attaches_while_the_broker_leaves_is_served(is_idle: bool) -> None:
    store = TickStore()
    replica = await opened(store)
    with listening(replica, 1):
        await replica.attend()
    store.gate.clear()
    leaving = asyncio.create_task(replica.leave() if is_idle else replica.keep_time())
    await until(lambda: store.num_ticks == 2)
    with listening(replica, 1):
        attending = asyncio.create_task(replica.attend())
        await asyncio.sleep(0)
        store.gate.set()
        await asyncio.gather(leaving, attending)
        assert store.brokers() == {"a"}


@pytest.mark.parametrize("is_idle", [False, True], ids=["no stream listens", "the run is idle"])
async def test_a_broker_that_failed_to_leave_leaves_later(is_idle: bool) -> None:
    store = TickStore()
    replica = await opened(store)
    leave = replica.leave if is_idle else replica.keep_time
    with listening(replica, 1):
        await replica.attend()
    store.is_away = True
    with pytest.raises(ServiceUnavailableError):
        await leave()
    store.is_away = False
    await leave()
    assert store.brokers() == set()


async def test_a_broker_serves_a_run_from_its_first_stream_on_whatever_it_has_to_store() -> None:
    store = TickStore()
    replica = await opened(store)
    replica.heartbeats.note(
        GeneratorNote(heard=Heard(holder_id="gen-1", lease_ids=frozenset(("x",)), heard_s=0.0), on_silent=_note_silent)
    )
    replica.heartbeats.next_turn()
    with listening(replica, 1):
        await replica.attend()
        assert store.brokers() == {"a"}


def _note_silent(_silent: object, _limit: SilenceLimit) -> None:
    pass
