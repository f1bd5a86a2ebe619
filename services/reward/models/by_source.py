"""Scores each sample by the reward of its source: one reward model over those of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from penstock.rewards import ModelAwayError, RewardModel
from penstock.rewards.model import DEFAULT_MAX_BATCH_SIZE
from penstock.v1 import reward_pb2, types_pb2
from penstock.wire.source_tag import read_tag
from services.reward.config import RewardModelConfig


def distinct_rewards(
    run: RewardModelConfig, sources: Mapping[str, RewardModelConfig]
) -> tuple[list[RewardModelConfig], dict[str, int]]:
    """The rewards, no two alike, the run's first; and by the name of each source with its own its number among them."""
    rewards = [run]
    for reward in sources.values():
        if reward not in rewards:
            rewards.append(reward)
    return rewards, {name: rewards.index(reward) for name, reward in sources.items()}


def reward_number(metadata_json: str, by_source: Mapping[str, int]) -> int:
    """The number of the reward of a sample with this metadata: 0, the run's, without a source that is known."""
    tag = read_tag(metadata_json)
    return 0 if tag is None else by_source.get(tag.source, 0)


class ModelsBySource:
    """The models of a run's rewards as one.

    Args:
        models: The run's first.
        by_source: The number of the model of each source that has its own.
    """

    def __init__(self, models: Sequence[RewardModel], by_source: Mapping[str, int]) -> None:
        self._models = models
        self._by_source = by_source

    @property
    def name(self) -> str:
        """The name of the run's."""
        return self._models[0].name

    async def check(self) -> str:
        """What all say. Raises RewardLoadError and ModelAwayError."""
        said = await asyncio.gather(*(model.check() for model in self._models))
        return "; ".join(filter(None, said))

    async def probe(self) -> None:
        """Return when all answer. Raises ModelAwayError."""
        await asyncio.gather(*(model.probe() for model in self._models))

    async def describe(self) -> reward_pb2.GetRewardModelResponse:
        """The run's, with what all of them can do."""
        found = reward_pb2.GetRewardModelResponse()
        found.CopyFrom(await self._models[0].describe())
        for model in self._models[1:]:
            # Samples of other sources are not to wait for one whose model is away.
            with suppress(ModelAwayError):
                other = await model.describe()
                found.wants_token_ids |= other.wants_token_ids
                sizes = (each.max_batch_size or DEFAULT_MAX_BATCH_SIZE for each in (found, other))
                found.max_batch_size = min(sizes)
        return found

    async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[types_pb2.Score]:
        """One score per item, in order. Raises PenstockError if one of the models that are asked did not answer."""
        numbers = [reward_number(item.metadata_json, self._by_source) for item in items]

        async def ask(number: int) -> list[types_pb2.Score]:
            own = [item for item, its in zip(items, numbers, strict=True) if its == number]
            return await self._models[number].score(own, timeout_s=timeout_s)

        asked = sorted(set(numbers))
        answers = dict(zip(asked, map(iter, await asyncio.gather(*map(ask, asked))), strict=True))
        return [next(answers[number]) for number in numbers]

    async def close(self) -> None:
        """Close all."""
        await asyncio.gather(*(model.close() for model in self._models))
