"""What a process knows of the runs of its token shards is read once for all of them, and never too old for a caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.clock import ManualClock
from penstock.errors import ServiceUnavailableError, UnknownRunError
from penstock.process.tasks import end
from services.broker.records.store import Delta, Mark, Root
from services.broker.records_pb2 import RunRecord
from services.broker.shards.run_facts import FACTS_LIFE_S, FactsOfRuns
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RUN, limits
from tests.helpers.waiting import until


class GatedStore(MemoryStore):
    """Roots are read at once, and returned once `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_readings = 0
        self.error: Exception | None = None
        self._mark: Mark | None = None

    async def put(self, **changes: Any) -> None:
        """Store the run with these fields."""
        self._mark = await self.commit(
            RUN, self._mark, Delta(run=RunRecord(limits=limits(), **changes).SerializeToString())
        )

    async def roots(self, run_ids: Sequence[str]) -> list[Root | None]:
        self.num_readings += 1
        found, error = await super().roots(run_ids), self.error
        await self.gate.wait()
        if error is not None:
            raise error
        return found


async def test_a_run_is_read_once_for_all_its_shards() -> None:
    store, clock = GatedStore(), ManualClock()
    await store.put(policy_version=3)
    runs = FactsOfRuns(store, clock.monotonic_s)
    for expected in (1, 2):
        found = await asyncio.gather(*(runs.of(RUN) for _ in range(8)))
        assert {facts.policy_version for facts in found} == {3}
        assert await runs.of(RUN, version=3) is found[0]
        assert store.num_readings == expected
        clock.advance(FACTS_LIFE_S + 0.1)


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        ({"policy_version": 3}, {"policy_version": 4}, {"version": 4}),
        ({"is_closed": True}, {"is_closed": False, "policy_version": 4}, {"needs_open": True}),
    ],
)
@pytest.mark.parametrize("is_under_way", [False, True])
async def test_a_caller_that_knows_more_gets_nothing_older(
    before: dict[str, Any], after: dict[str, Any], asked: dict[str, Any], is_under_way: bool
) -> None:
    store = GatedStore()
    await store.put(**before)
    runs = FactsOfRuns(store, ManualClock().monotonic_s)
    if is_under_way:
        store.gate.clear()
        early = asyncio.create_task(runs.of(RUN))
        await until(lambda: store.num_readings == 1)
    else:
        await runs.of(RUN)
    await store.put(**after)
    late = asyncio.gather(*(asyncio.create_task(runs.of(RUN, **asked)) for _ in range(4)))
    await asyncio.sleep(0)
    store.gate.set()
    assert {facts.policy_version for facts in await late} == {4}
    assert store.num_readings == 2
    if is_under_way:
        assert (await early).is_closed == bool(before.get("is_closed"))


async def test_what_is_read_now_is_no_older_than_the_call() -> None:
    store = GatedStore()
    await store.put(policy_version=1)
    runs = FactsOfRuns(store, ManualClock().monotonic_s)
    store.gate.clear()
    early = asyncio.create_task(runs.of(RUN))
    await until(lambda: store.num_readings == 1)
    await store.put(policy_version=2)
    second = asyncio.create_task(runs.read_now(RUN))
    await asyncio.sleep(0)
    store.gate.set()
    assert [(await task).policy_version for task in (early, second)] == [1, 2]


async def test_callers_that_wait_together_fail_together_and_the_next_one_reads_again() -> None:
    store = GatedStore()
    runs = FactsOfRuns(store, ManualClock().monotonic_s)
    store.gate.clear()
    store.error = ServiceUnavailableError("the store is away")
    callers = [asyncio.create_task(runs.of(RUN)) for _ in range(4)]
    await until(lambda: store.num_readings == 1)
    await end(callers[0])
    store.gate.set()
    found = await asyncio.gather(*callers[1:], return_exceptions=True)
    assert [type(error) for error in found] == [ServiceUnavailableError] * 3
    assert store.num_readings == 1
    store.error = None
    with pytest.raises(UnknownRunError):
        await runs.of(RUN)
    await store.put(policy_version=1)
    assert (await runs.of(RUN)).policy_version == 1
