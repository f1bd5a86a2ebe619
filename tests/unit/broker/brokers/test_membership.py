"""Brokers that answer the roll know each other, and one that cannot answer owns nothing."""

from __future__ import annotations

import pytest

from penstock.clock import ManualClock
from penstock.errors import ServiceUnavailableError
from services.broker.brokers.membership import Membership
from services.broker.records.roll import SILENT_S, Broker, Roll
from services.broker.storage.memory_store import MemoryStore

RUN = "run-1"


class CutStore(MemoryStore):
    """One that can be away."""

    is_cut = False

    async def answer_roll(self, broker: Broker, process: str, *, is_leaving: bool = False) -> Roll:
        """See `Store.answer_roll`."""
        if self.is_cut:
            raise ServiceUnavailableError("away")
        return await super().answer_roll(broker, process, is_leaving=is_leaving)


def member(store: MemoryStore, clock: ManualClock, name: str, *serves: str) -> Membership:
    return Membership(store, name=name, address=name, clock=clock, serves=lambda: (frozenset(serves), frozenset()))


async def test_all_brokers_name_the_same_owners() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    brokers = [member(store, clock, f"host-{number}:7301") for number in range(3)]
    for broker in brokers * 2:
        await broker.answer()
    maps = [[owner.name for owner in broker.shard_owners(RUN, 6)] for broker in brokers]
    assert maps[0] == maps[1] == maps[2]
    assert len(set(maps[0])) == 3
    assert len({broker.roll.epoch for broker in brokers if broker.roll}) == 1


async def test_a_broker_that_is_silent_owns_nothing_and_the_epoch_rises() -> None:
    clock = ManualClock()
    store, held = MemoryStore(clock), CutStore(clock)
    held._roll = store._roll
    lives, dies = member(store, clock, "a:1"), member(held, clock, "b:1")
    await dies.answer()
    await lives.answer()
    await dies.answer()
    assert {owner.name for owner in dies.shard_owners(RUN, 2)} == {"a:1", "b:1"}
    assert lives.roll is not None
    epoch = lives.roll.epoch
    held.is_cut = True
    clock.advance(SILENT_S + 0.1)
    with pytest.raises(ServiceUnavailableError):
        await dies.answer()
    await lives.answer()
    assert dies.shard_owners(RUN, 2) == []
    assert dies.core_owner(RUN) is None
    assert [owner.name for owner in lives.shard_owners(RUN, 2)] == ["a:1", "a:1"]
    assert lives.roll is not None
    assert lives.roll.epoch > epoch


async def test_one_that_leaves_is_gone_at_once() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    stays, leaves = member(store, clock, "a:1"), member(store, clock, "b:1")
    await leaves.answer()
    await leaves.leave()
    await stays.answer()
    assert stays.roll is not None
    assert set(stays.roll.brokers) == {"a:1"}


async def test_the_core_belongs_to_the_broker_that_the_runs_clients_are_at() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    names = [f"host-{number}:1" for number in range(8)]
    brokers = [member(store, clock, name, *([RUN] if name == "host-5:1" else [])) for name in names]
    for broker in brokers:
        await broker.answer()
    owner = brokers[-1].core_owner(RUN)
    assert owner is not None
    assert owner.name == "host-5:1"
    other = brokers[-1].core_owner("run-2")
    assert other is not None
    assert other.name in names


async def test_without_a_trainer_it_belongs_to_the_broker_that_the_generators_are_at() -> None:
    clock = ManualClock()
    store, names = MemoryStore(clock), [f"host-{number}:1" for number in range(8)]
    for name in names:
        leases = frozenset([RUN]) if name == "host-2:1" else frozenset[str]()
        await store.answer_roll(Broker(name=name, address=name, leases=leases), "p")
    asker = member(store, clock, "host-7:1")
    await asker.answer()
    assert [owner.name for owner in [asker.core_owner(RUN)] if owner] == ["host-2:1"]


async def test_two_processes_of_one_name_are_noticed_and_a_successor_is_not() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    dead, successor = member(store, clock, "a:1"), member(store, clock, "a:1")
    await dead.answer()
    for _ in range(3):
        await successor.answer()
    assert successor.num_rivals_met == 0
    await dead.answer()
    await successor.answer()
    assert (dead.num_rivals_met, successor.num_rivals_met) == (1, 1)


async def test_epochs_rise_even_if_the_store_loses_the_roll() -> None:
    clock = ManualClock()
    before = await MemoryStore(clock).answer_roll(Broker(name="a", address="a:1"), "p")
    clock.advance(1.0)
    after = await MemoryStore(clock).answer_roll(Broker(name="a", address="a:1"), "p")
    assert after.epoch > before.epoch
