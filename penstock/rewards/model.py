"""The two interfaces of a reward model: the one a process scores with, and the one a user subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import ServiceUnavailableError
from penstock.rewards.types import RewardItem, RewardResult
from penstock.v1 import reward_pb2, types_pb2

DEFAULT_MAX_BATCH_SIZE = 64


class ModelAwayError(ServiceUnavailableError):
    """The reward model cannot be reached; nothing was judged, which says nothing about the samples."""


class RewardModel(Protocol):
    """Scores batches at the level of the wire contract.

    Promises: one score per item, in order; scoring is repeatable; a sample that cannot be judged gets a status of its
    own and does not disturb its neighbours. `score` raises PenstockError when nothing could be judged.
    """

    @property
    def name(self) -> str:
        """Name for logs, reports and Score.model."""
        ...

    async def check(self) -> str:
        """See `BatchReward.check`; empty where nothing can be said before it scores."""
        ...

    async def probe(self) -> None:
        """Return when the model answers; raises ModelAwayError when it does not within seconds."""
        ...

    async def describe(self) -> reward_pb2.GetRewardModelResponse:
        """Its name, version, limits and preferences."""
        ...

    async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[types_pb2.Score]:
        """One score per item, in order, within `timeout_s` seconds."""
        ...

    async def close(self) -> None:
        """Release connections, threads and processes."""
        ...


class BatchReward(ABC):
    """Subclass this to score batches, for example with a neural reward model.

    Example:
        class LengthPenalty(BatchReward):
            async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
                return [RewardResult(-len(item.completion) / 1000) for item in items]
    """

    name: str = ""
    """Name for logs and reports; empty means the class's name."""
    version: str = ""
    """Version of the model, free text."""
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    """Most items in one call."""
    wants_token_ids: bool = False
    """Whether RewardItem.token_ids should be filled."""

    @abstractmethod
    async def score(self, items: Sequence[RewardItem]) -> Sequence[RewardResult]:
        """One result per item, in order; raising fails every item of the batch.

        ModelAwayError fails none: it says that what this reward calls is away, and samples wait until `probe` returns.
        """

    async def score_within(self, items: Sequence[RewardItem], *, timeout_s: float) -> Sequence[RewardResult]:
        """`score` for a caller that waits `timeout_s` seconds; override to give up on single items instead of all."""
        del timeout_s
        return await self.score(items)

    async def check(self) -> str:
        """Try once, before a run begins, what scoring needs; what was found, in words, if anything is to be said.

        Raises RewardLoadError where it cannot work and waiting does not help, ModelAwayError where it does not answer.
        """
        return ""

    async def probe(self) -> None:  # noqa: B027 -- most rewards call nothing that could be away
        """Return when what this reward calls answers; raises ModelAwayError when it does not within seconds."""

    async def close(self) -> None:  # noqa: B027 -- most rewards hold nothing, so this is optional to override
        """Release what it holds; called once, when serving ends."""
