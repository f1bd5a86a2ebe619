"""Samples are scored by the reward of their source, and a reward that is away holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from penstock.wire.source_tag import SourceTag, tagged
from services.reward.config import RewardModelConfig
from services.reward.source_pools import SourcePools
from tests.helpers.waiting import until
from tests.unit.reward.test_pool import FakeModel, FakeSource

OWN = RewardModelConfig(model="own", max_batch_size=4, max_concurrent_batches=1)
RUNS = RewardModelConfig(max_batch_size=4, max_concurrent_batches=1)


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays(**_: object) -> Iterator[float]:
        while True:
            yield 0.001

    monkeypatch.setattr("services.reward.pool.backoff_s", delays)
    monkeypatch.setattr("services.reward.breaker.backoff_s", delays)


@pytest.fixture
def source() -> FakeSource:
    """Samples of source hard at every third place, then of easy, then of none."""
    found = FakeSource(60)
    for number, lease in enumerate(found.held.values()):
        if name := ("hard", "easy", "")[number % 3]:
            lease.item.metadata_json = tagged("", SourceTag(source=name))
    return found


@asynccontextmanager
async def running(pools: SourcePools) -> AsyncIterator[None]:
    task = asyncio.create_task(pools.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_each_sample_is_scored_by_the_reward_of_its_source(source: FakeSource) -> None:
    runs, own = FakeModel(lambda items: [1.0] * len(items)), FakeModel(lambda items: [2.0] * len(items))
    pools = SourcePools(source, [(RUNS, runs), (OWN, own)], {"hard": OWN}, texts=None)
    async with running(pools):
        await until(lambda: not source.held)
    assert source.num_answers == 60
    assert {number: score.value for number, score in source.scores.items()} == {
        number: 1.0 if number % 3 else 2.0 for number in range(60)
    }


async def test_a_reward_that_is_away_holds_up_no_other(source: FakeSource) -> None:
    runs, own = FakeModel(lambda items: [1.0] * len(items)), FakeModel(lambda items: [2.0] * len(items))
    own.is_up = False
    pools = SourcePools(source, [(RUNS, runs), (OWN, own)], {"hard": OWN}, texts=None)
    async with running(pools):
        await until(lambda: len(source.scores) == 40)
        await until(lambda: pools.holding_reason != "")
        assert pools.num_held_back == 20 == source.num_held
        # What another worker has got meanwhile is not counted.
        del source.held["0"]
        assert pools.num_held_back == 19
        own.is_up = True
        await until(lambda: not source.held)
        assert pools.holding_reason == ""
    assert sum(score.value == 2.0 for score in source.scores.values()) == 19
