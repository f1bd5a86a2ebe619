"""Rewards of functions so fast that a thread would cost more than the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.rewards import BatchReward, RewardItem, RewardResult
from penstock.rewards.outcomes import read_error


class InlineReward(BatchReward):
    """Calls `function(item)` in the event loop, once a sample. For the built-in rules only."""

    max_batch_size = 1024

    def __init__(self, function: Callable[[RewardItem], float], *, name: str) -> None:
        self.name = name
        self._function = function

    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order."""
        return [self._score_one(item) for item in items]

    def _score_one(self, item: RewardItem) -> RewardResult:
        try:
            return RewardResult(self._function(item))
        except Exception as error:  # of this sample only: its neighbours keep their scores
            return read_error(error, name=self.name)
