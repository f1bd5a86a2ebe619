"""Samples are scored by the reward of their source, and a reward that is away holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest

from penstock.network.rpc import open_channel
from penstock.rewards import BatchReward, RewardItem, RewardResult
from penstock.rewards.local import LocalModel
from penstock.rewards.serving import reward_service
from penstock.v1 import reward_pb2, reward_pb2_grpc
from penstock.wire.source_tag import SourceTag, tagged
from services.reward.config import RewardModelConfig
from services.reward.models.build import InlineReward
from services.reward.models.by_source import ModelsBySource, distinct_rewards
from services.reward.source_pools import SourcePools
from tests.helpers.serving import serving
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
    pools = SourcePools(source, [(RUNS, runs), (OWN, own)], {"hard": 1}, texts=None)
    async with running(pools):
        await until(lambda: not source.held)
    assert source.num_answers == 60
    assert {number: score.value for number, score in source.scores.items()} == {
        number: 1.0 if number % 3 else 2.0 for number in range(60)
    }


async def test_a_reward_that_is_away_holds_up_no_other(source: FakeSource) -> None:
    runs, own = FakeModel(lambda items: [1.0] * len(items)), FakeModel(lambda items: [2.0] * len(items))
    own.is_up = False
    pools = SourcePools(source, [(RUNS, runs), (OWN, own)], {"hard": 1}, texts=None)
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


async def test_what_others_ask_of_the_worker_is_scored_by_the_reward_of_its_source(source: FakeSource) -> None:
    runs, own = LocalModel(InlineReward(lambda _: 1.0, name="runs")), LocalModel(_Small())
    rewards, by_source = distinct_rewards(RUNS, {"hard": OWN, "easy": RUNS})
    assert (rewards, by_source) == ([RUNS, OWN], {"hard": 1, "easy": 0})
    async with (
        serving(reward_service(ModelsBySource([runs, own], by_source))) as (_, target),
        open_channel(target) as channel,
    ):
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        description = await stub.GetRewardModel(reward_pb2.GetRewardModelRequest())
        assert (description.name, description.max_batch_size, description.wants_token_ids) == ("runs", 8, True)
        items = [lease.item for lease in source.held.values()][:8]
        scores = (await stub.Score(reward_pb2.ScoreRequest(items=items))).scores
    assert [(score.model, score.value) for score in scores] == [
        ("runs", 1.0) if number % 3 else ("small", 2.0) for number in range(8)
    ]


class _Small(BatchReward):
    name, max_batch_size, wants_token_ids = "small", 8, True

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [RewardResult(2.0) for _ in items]
