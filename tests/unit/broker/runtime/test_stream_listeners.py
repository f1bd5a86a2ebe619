"""Which streams a change wakes: those that it gives something to send, of a thousand that wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

import pytest

from penstock.clock import SystemClock
from penstock.process.time_limits import Wake
from penstock.v1 import broker_pb2, types_pb2
from services.broker.fleet.deal_round import Seat
from services.broker.operations import append_tokens, drops, submission
from services.broker.operations.leasing import GeneratorFacts
from services.broker.runtime.run_replica import RunReplica
from services.broker.runtime.stream_listeners import Topic
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import chunk, limits, prompt
from tests.unit.broker.builders import as_lease, lease, read_chunk


class Fleet:
    """A run to which two generators and a reward worker listen; only one of the generators has room."""

    def __init__(self, replica: RunReplica, store: MemoryStore, listening: ExitStack) -> None:
        self.replica, self.store = replica, store
        self.wakes = {name: Wake() for name in ("gen-1", "gen-2", "scoring", "end")}
        for name, num_free in (("gen-1", 0), ("gen-2", 4)):
            listening.enter_context(replica.leasing(self.wakes[name], name))
            facts = GeneratorFacts(generator_id=name, policy_version=0, max_context_tokens=1 << 20)
            seat = Seat(facts, num_free, wake=self.wakes[name].set)
            replica.lease_rounds.join(seat)
        listening.enter_context(replica.listening(self.wakes["scoring"], topic=Topic.SCORING))
        listening.enter_context(replica.listening(self.wakes["end"], topic=Topic.END))

    async def woken(self, operation: Callable[[RunState], Any]) -> set[str]:
        """Who is woken by a change."""
        await self.replica.transact(operation)
        return self.taken()

    def taken(self) -> set[str]:
        """Who was woken; all sleep again."""
        found = {name for name, wake in self.wakes.items() if wake.is_set()}
        for wake in self.wakes.values():
            wake.clear()
        return found


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    store = MemoryStore()
    replica = RunReplica("run-1", store=store, clock=SystemClock())
    await replica.open(broker_pb2.OpenRunRequest(run_id="run-1", limits=limits(max_queued_groups=1000)))
    with ExitStack() as listening:
        found = Fleet(replica, store, listening)
        await replica.transact(lambda state: submission.submit(state, [prompt("a")], retired=(), now_s=1.0))
        found.taken()
        yield found


def submit(*names: str) -> Callable[[RunState], Any]:
    return lambda state: submission.submit(state, [prompt(name) for name in names], retired=(), now_s=1.0)


async def test_new_prompts_wake_generators_with_room(fleet: Fleet) -> None:
    assert await fleet.woken(submit("b")) == {"gen-2"}


async def test_a_lease_wakes_its_generator(fleet: Fleet) -> None:
    assert "gen-1" in await fleet.woken(lambda state: lease(state, 1))


async def test_a_finished_sample_wakes_reward_workers(fleet: Fleet) -> None:
    grants = await fleet.replica.transact(lambda state: lease(state, 4))
    fleet.taken()
    facts = [read_chunk(chunk(as_lease(grant), [5, 6], finish=types_pb2.FINISH_REASON_STOP)) for grant in grants]
    woken = await fleet.woken(lambda state: append_tokens.accept_chunks(state, "gen-1", facts, 3.0))
    assert woken == {"gen-1", "scoring"}


async def test_a_drop_wakes_who_held_leases(fleet: Fleet) -> None:
    await fleet.replica.transact(lambda state: lease(state, 4))
    fleet.taken()
    assert await fleet.woken(lambda state: drops.drop_groups(state, ["a"], "test")) == {"gen-1"}


async def test_what_lets_a_group_start_wakes_generators_with_room_if_one_waits(fleet: Fleet) -> None:
    def advance(state: RunState) -> None:
        state.run.policy_version += 1

    assert await fleet.woken(advance) == {"gen-2"}
    await fleet.replica.transact(lambda state: drops.drop_groups(state, ["a"], "test"))
    fleet.taken()
    assert await fleet.woken(advance) == set()


async def test_a_new_owner_wakes_all_that_tell_of_it(fleet: Fleet) -> None:
    def take_over(state: RunState) -> None:
        state.run.owner.epoch += 1

    assert await fleet.woken(take_over) == {"gen-1", "gen-2", "scoring"}


async def test_the_end_wakes_all(fleet: Fleet) -> None:
    assert await fleet.woken(lambda state: setattr(state.run, "is_closed", True)) == set(fleet.wakes)


async def test_changes_of_other_brokers_wake_the_streams_they_concern(fleet: Fleet) -> None:
    other = RunReplica("run-1", store=fleet.store, clock=SystemClock())
    await other.transact(lambda state: lease(state, 4))
    await fleet.replica.poll()
    assert fleet.taken() >= {"gen-1"}
    await other.transact(submit("b"))
    await fleet.replica.poll()
    assert fleet.taken() == {"gen-2"}
