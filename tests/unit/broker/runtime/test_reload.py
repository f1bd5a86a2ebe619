"""Loading a run's copy: in slices, outside of every deadline, and trained groups unread until somebody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest

from penstock.clock import SystemClock
from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2
from services.broker.operations.lifecycle import reopen_run
from services.broker.records.store import Delta, Mark, Snapshot
from services.broker.replicas.document_replica import TRANSACTION_TIMEOUT_S
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.run_audit import audit
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams import export_stream
from services.broker.streams.export_stream import Cursor
from tests.helpers.brokers.broker import limits
from tests.helpers.virtual_time import VirtualLoop
from tests.unit.broker.builders import acknowledge, deliver, loaded, make_ready, open_state, submit

RUN = "run-1"
LOAD_S = 60.0


def trained_state(num_steps: int, records: dict[str, bytes | None]) -> RunState:
    """A run after some steps of a group each, and one group that waits; `records` become those that a store has."""
    state = open_state(groups_per_step=1)
    for version in range(num_steps):
        make_ready(state, f"g{version}", version=version)
        acknowledge(state, deliver(state), version + 1)
        records.update(committed(state).groups)
    submit(state, "waiting")
    records.update(committed(state).groups)
    return state


def committed(state: RunState) -> Delta:
    """What the next commit stores."""
    delta = state.delta()
    state.settle()
    return delta


async def stored(store: MemoryStore, num_groups: int) -> None:
    """Store a run of many live groups of about 1 kB each."""
    state = open_state(group_size=8, max_queued_groups=num_groups + 10)
    submit(state, *(f"{number}-{'x' * 100}" for number in range(num_groups)))
    for group_id in list(state.index.live):
        with state.edit(group_id) as group:
            for sample in group.samples:
                sample.generator_id = "g" * 100
    await store.commit(RUN, None, state.delta())


async def test_others_run_between_the_slices_of_a_load() -> None:
    store = MemoryStore()
    await stored(store, 3_000)
    num_turns = 0

    async def heartbeat() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    beating = asyncio.create_task(heartbeat())
    state = await RunReplica(RUN, store=store, clock=SystemClock()).transact(lambda state: state)
    beating.cancel()
    assert len(state.groups) == 3_000
    assert num_turns >= 20


class SlowStore(MemoryStore):
    """Takes its time to load everything; commits hang while `is_stuck`."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[Mark | None] = []
        self.is_stuck = False

    async def load(self, run_id: str, since: Mark | None) -> Snapshot | None:
        self.loads.append(since)
        if since is None:
            await asyncio.sleep(LOAD_S)
        return await super().load(run_id, since)

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        if self.is_stuck:
            await asyncio.Event().wait()
        return await super().commit(run_id, expected, delta)


def in_virtual_time(scenario: Callable[[VirtualLoop, SlowStore, RunReplica], Any]) -> None:
    """Play a scenario with a replica that has not loaded its run yet."""

    async def play() -> None:
        store = SlowStore()
        await stored(store, 1)
        await scenario(loop, store, RunReplica(RUN, store=store, clock=loop))

    with closing(VirtualLoop()) as loop:
        loop.run_until_complete(play())


def test_calls_wait_for_a_load_however_long_it_takes() -> None:
    async def scenario(loop: VirtualLoop, _store: SlowStore, replica: RunReplica) -> None:
        first = asyncio.create_task(replica.transact(lambda state: submit(state, "first")))
        await asyncio.sleep(TRANSACTION_TIMEOUT_S - 1)
        late = asyncio.create_task(replica.transact(lambda state: submit(state, "late")))
        assert await asyncio.gather(first, late) == [[], []]
        assert replica.copy is not None
        assert replica.copy.groups.keys() >= {"first", "late"}
        assert loop.time() == LOAD_S

    in_virtual_time(scenario)


def test_after_a_load_the_deadlines_go_on() -> None:
    async def scenario(loop: VirtualLoop, store: SlowStore, replica: RunReplica) -> None:
        store.is_stuck = True
        with pytest.raises(ServiceUnavailableError):
            await replica.transact(lambda state: submit(state, "a"))
        assert loop.time() == LOAD_S + TRANSACTION_TIMEOUT_S

    in_virtual_time(scenario)


def test_a_load_continues_when_its_callers_give_up_and_the_next_call_finds_it_done() -> None:
    async def scenario(loop: VirtualLoop, store: SlowStore, replica: RunReplica) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOAD_S / 2):
                await replica.transact(lambda state: submit(state, "gone"))
        await asyncio.sleep(LOAD_S)
        before_s = loop.time()
        assert await replica.transact(lambda state: submit(state, "b")) == []
        assert (loop.time(), store.loads.count(None)) == (before_s, 1)

    in_virtual_time(scenario)


def test_a_copy_whose_trained_groups_were_not_read_does_what_one_does_that_has_read_them() -> None:
    records: dict[str, bytes | None] = {}
    kept = trained_state(5, records)
    unread = loaded(kept.run.SerializeToString(), records)
    read = loaded(kept.run.SerializeToString(), records)
    for group_id in list(read.groups):
        read.groups.opened(group_id)
    states = (kept, unread, read)

    def same(action: Callable[[RunState], Any]) -> Any:
        """What the action returns and changes, which all of them agree on."""
        results = [(action(state), committed(state)) for state in states]
        assert results[0] == results[1] == results[2]
        return results[0][0]

    def exported(state: RunState) -> list[Any]:
        steps = [export_stream.plan(state, Cursor(next_version=version, history=0)) for version in range(1, 6)]
        return [(step, export_stream._records(state, planned=step, start=0)) for step in steps]

    def rewound(state: RunState) -> broker_pb2.OpenRunResponse:
        request = broker_pb2.OpenRunRequest(
            run_id=RUN, limits=limits(groups_per_step=1), policy_version=2, takes_over=True
        )
        return reopen_run(state, request, 7.0)

    assert [step.names for step, _ in same(exported)] == [(f"g{version}",) for version in range(5)]
    assert same(lambda state: acknowledge(state, ["g4"], 5)).num_samples == 2
    assert same(audit).balanced
    assert same(rewound).num_groups_in_flight == 4
    assert same(lambda state: sorted(state.index.trained)) == [1, 2]
    assert same(audit).balanced
    for state in states:
        state.policy = replace(state.policy, num_retained_steps=1)
    assert sorted(same(deliver)) == ["g2"]
    same(lambda state: acknowledge(state, ["g2"], 3))
    assert same(lambda state: (sorted(state.index.trained), sorted(state.groups))) == (
        [3],
        ["g2", "g3", "g4", "waiting"],
    )


def test_a_failed_rewind_leaves_no_trace_in_a_copy_that_was_not_read() -> None:
    records: dict[str, bytes | None] = {}
    state = loaded(trained_state(3, records).run.SerializeToString(), records)
    request = broker_pb2.OpenRunRequest(run_id=RUN, limits=limits(groups_per_step=1), policy_version=1, takes_over=True)
    reopen_run(state, request, 7.0)
    assert sorted(state.index.trained) == [1]
    state.rollback()
    assert sorted(state.index.trained) == [1, 2, 3]
    assert {name: state.groups.serialized(name) for name in state.groups} == records
    assert not state.is_changed
