"""Generators and a run that was rewound: a version's number is not enough to know the weights by."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.broker import lease_stream
from services.broker.generation import ABANDONED_WEIGHTS
from services.broker.store import Store
from tests.helpers.broker import Generator, RunningBroker, prompt, serving
from tests.helpers.steps import train_step


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
