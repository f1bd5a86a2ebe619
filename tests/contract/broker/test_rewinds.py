"""Generators and a run that was rewound: a version's number is not enough to know the weights by."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.v1 import broker_pb2
from services.broker.operations.leasing import ABANDONED_WEIGHTS
from services.broker.records.store import Store
from services.broker.streams import lease_stream
from tests.helpers.brokers.broker import Generator, RunningBroker, prompt, serving
from tests.helpers.brokers.steps import train_step


@pytest.fixture
async def broker(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningBroker]:
    monkeypatch.setattr(lease_stream, "IDLE_EVERY_S", 0.1)
    async with serving(store) as running:
        yield running


async def test_a_generator_that_missed_a_rewind_gets_no_work_before_it_has_pulled(broker: RunningBroker) -> None:
    await broker.open(max_staleness=1)
    await train_step(broker, "a", "b")
    await broker.open(version=0, max_staleness=1)
    await broker.submit(prompt("c"))
    generator = Generator.connect(broker.channel, "gen-late")
    generator.beat(credits=2, version=1, history=0)
    while await generator.idle_reason() != ABANDONED_WEIGHTS:
        pass
    generator.beat(version=0, history=1)
    assert {lease.key.group_id for lease in await generator.leases(2)} == {"c"}


async def test_a_generator_that_does_not_say_is_leased_to(broker: RunningBroker) -> None:
    await broker.open(max_staleness=1)
    await train_step(broker, "a", "b")
    await broker.open(version=0, max_staleness=1)
    await broker.submit(prompt("c"))
    generator = Generator.connect(broker.channel, "gen-plain")
    generator.beat(credits=2, version=0)
    assert len(await generator.leases(2)) == 2


async def test_a_rewind_behind_what_is_retained_drops_it_by_name_and_the_run_goes_on(broker: RunningBroker) -> None:
    policy = broker_pb2.RunPolicy(num_retained_steps=1)
    await broker.open(policy=policy)
    for version in range(4):
        await train_step(broker, f"a{version}", f"b{version}", version=version)
    opened = await broker.open(version=1, policy=policy)
    assert (opened.num_groups_rewound, opened.num_samples_abandoned, opened.history) == (2, 2 * 4, 1)
    books = await broker.audit()
    assert (books.trained, dict(books.dropped), books.in_flight) == (4, {"abandoned_step": 8}, 4)
    assert books.balanced
    # A trainer submits again what its checkpoint calls outstanding: what is gone is known, and adds nothing.
    await broker.submit(*(prompt(name) for name in ("a1", "b1", "a2", "b2")))
    assert (await broker.audit()).submitted == books.submitted
    for version in range(1, 4):
        names = () if version == 1 else (f"c{version}", f"d{version}")
        await train_step(broker, *names, version=version, num_groups=2)
    books = await broker.audit()
    assert (books.trained, books.in_flight, books.balanced) == (16, 0, True)
