"""Lets a candidate that exceeded its limits count as wrong, by the policy `candidate_limit: wrong`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.rewards import RewardModel
from penstock.v1 import reward_pb2, types_pb2

EXCEEDED_LIMIT = "exceeded_limit"
"""The component that distinguishes such samples from those that were judged."""


class WrongAtLimit:
    """A reward model whose CANDIDATE_LIMIT is a score of 0."""

    def __init__(self, model: RewardModel) -> None:
        self._model = model

    @property
    def name(self) -> str:
        """The model's own name."""
        return self._model.name

    async def check(self) -> str:
        """As the model's."""
        return await self._model.check()

    async def probe(self) -> None:
        """As the model's."""
        await self._model.probe()

    async def describe(self) -> reward_pb2.GetRewardModelResponse:
        """As the model's."""
        return await self._model.describe()

    async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[types_pb2.Score]:
        """One score per item, in order."""
        return [_judged(score) for score in await self._model.score(items, timeout_s=timeout_s)]

    async def close(self) -> None:
        """As the model's."""
        await self._model.close()


def _judged(score: types_pb2.Score) -> types_pb2.Score:
    if score.status != types_pb2.SCORE_STATUS_CANDIDATE_LIMIT:
        return score
    return types_pb2.Score(
        status=types_pb2.SCORE_STATUS_OK, value=0.0, components={EXCEEDED_LIMIT: 1.0}, model=score.model
    )
