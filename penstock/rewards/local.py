"""A BatchReward as a RewardModel: messages in, messages out, one bad sample never disturbing its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

from penstock.errors import InvalidFieldError
from penstock.process.logger import get_logger
from penstock.rewards.model import BatchReward, ModelAwayError
from penstock.rewards.outcomes import clean_text, describe, is_own_cancellation, read_error
from penstock.rewards.score_messages import read_item, write_score
from penstock.rewards.types import RewardItem, RewardResult, ScoreStatus, UnscorableError
from penstock.v1 import reward_pb2, types_pb2

_log = get_logger()

_PENDING = object()


class LocalModel:
    """Scores in this process. Fails as a whole only where its reward says that what it calls is away."""

    def __init__(self, reward: BatchReward) -> None:
        self._reward = reward

    @property
    def name(self) -> str:
        """The reward's own name."""
        return clean_text(self._reward.name or type(self._reward).__name__)

    async def check(self) -> str:
        """What the reward's own check says. Raises RewardLoadError and ModelAwayError."""
        return await self._reward.check()

    async def probe(self) -> None:
        """Return when the reward can score. Raises ModelAwayError."""
        try:
            await self._reward.probe()
        except Exception as error:  # a user's class may raise anything
            if isinstance(error, ModelAwayError):
                raise
            raise ModelAwayError(f"its probe raised {describe(error)}") from error

    async def describe(self) -> reward_pb2.GetRewardModelResponse:
        """The reward's name, version, limits and preferences."""
        return reward_pb2.GetRewardModelResponse(
            name=self.name,
            max_batch_size=self._reward.max_batch_size,
            wants_token_ids=self._reward.wants_token_ids,
            version=clean_text(self._reward.version),
        )

    async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[types_pb2.Score]:
        """One score per item, in order. Raises ModelAwayError where the reward does."""
        results: list[object] = []
        readable: list[RewardItem] = []
        for message in items:
            try:
                readable.append(read_item(message))
                results.append(_PENDING)
            except InvalidFieldError as error:
                results.append(RewardResult(status=ScoreStatus.INVALID, message=str(error)))
        answers = iter(await self._judge(readable, timeout_s)) if readable else iter(())
        return [write_score(next(answers) if result is _PENDING else result, model=self.name) for result in results]

    async def close(self) -> None:
        """Release what the reward holds."""
        await self._reward.close()

    async def _judge(self, items: list[RewardItem], timeout_s: float) -> Sequence[object]:
        """The reward's answers, one object per item: `write_score` reads any object."""
        try:
            # A little longer than the deadline given to the reward, whose own verdict on slow items comes first.
            async with asyncio.timeout(timeout_s * 1.05 + 0.1):
                results = await self._reward.score_within(items, timeout_s=timeout_s)
                # One more than asked for shows a wrong count, even of an iterable that never ends.
                results = list(islice(results, len(items) + 1))
        except TimeoutError:
            message = f"{self.name} did not answer within {timeout_s:.3g} s"
            return [RewardResult(status=ScoreStatus.TIMEOUT, message=message)] * len(items)
        except ModelAwayError:
            raise
        except BaseException as error:  # a user's class may raise anything; it concerns this batch only
            if isinstance(error, GeneratorExit) or is_own_cancellation(error):
                raise
            if not isinstance(error, UnscorableError):
                _log.error("reward model raised", model=self.name, num_items=len(items), exc_info=error)
            return [read_error(error, name=self.name)] * len(items)
        if len(results) != len(items):
            count = len(results) if len(results) < len(items) else f"more than {len(items)}"
            message = f"{self.name} answered {count} results for {len(items)} items"
            _log.error("reward model answered a wrong count", model=self.name, problem=message)
            return [RewardResult(status=ScoreStatus.FAILED, message=message)] * len(items)
        return results
