"""Scores samples by the rewards of their sources: a pool for each reward, over the leases of one worker.

    leases of the broker --(by the source in a sample's metadata)--> lanes --> pools, each with a breaker of its own

Invariants:
- A sample of a source without a reward of its own, or of none that is known here, is scored by the run's reward.
- A reward that is away holds up no other: its pool's samples wait in its own lane, and the worker leases as many more
  as wait there, up to the most that any worker may hold.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence

from penstock.rewards import RewardModel
from penstock.v1 import broker_pb2
from services.reward.config import RewardModelConfig
from services.reward.models.by_source import reward_number
from services.reward.pool import LeaseSource, ScoringPool, TextReader

MAX_TAKEN = 256


class Lane:
    """The leases of one pool."""

    def __init__(self, source: LeaseSource) -> None:
        self._source = source
        self._waiting: deque[broker_pb2.ScoringLease] = deque()
        self._is_news = asyncio.Event()
        self._unanswered: set[str] = set()

    @property
    def num_held(self) -> int:
        """Leases of this lane that are not answered yet, lost ones left out."""
        self._unanswered = {lease_id for lease_id in self._unanswered if self._source.is_held(lease_id)}
        return len(self._unanswered)

    def put(self, lease: broker_pb2.ScoringLease) -> None:
        """Add a lease; bounded by what its source hands out."""
        self._waiting.append(lease)
        self._unanswered.add(lease.lease_id)
        self._is_news.set()

    async def take(self, *, max_items: int) -> list[broker_pb2.ScoringLease]:
        """At least one lease, each handed out once; waits while there is none."""
        while True:
            taken: list[broker_pb2.ScoringLease] = []
            while self._waiting and len(taken) < max_items:
                lease = self._waiting.popleft()
                if self._source.is_held(lease.lease_id):
                    taken.append(lease)
            if taken:
                return taken
            self._is_news.clear()
            await self._is_news.wait()

    def is_held(self, lease_id: str) -> bool:
        """Whether the lease still counts."""
        return self._source.is_held(lease_id)

    def answer(self, results: Sequence[broker_pb2.ScoreResult]) -> None:
        """Pass results on."""
        self._unanswered.difference_update(result.lease_id for result in results)
        self._source.answer(results)


class SourcePools:
    """Deals the leases of a worker out to the pools of its rewards.

    Args:
        source: Where leases come from.
        rewards: Each with its model, no two alike; the first is the run's.
        by_source: The number of the reward of each source that has one of its own.
        texts: Decodes the texts of samples, for all pools.
    """

    def __init__(
        self,
        source: LeaseSource,
        rewards: Sequence[tuple[RewardModelConfig, RewardModel]],
        by_source: Mapping[str, int],
        *,
        texts: TextReader | None,
    ) -> None:
        self._source = source
        self._lanes = [
            (lane, ScoringPool(source=lane, model=model, config=config, texts=texts))
            for config, model in rewards
            for lane in (Lane(source),)
        ]
        self._by_source = by_source

    @property
    def samples_per_second(self) -> float:
        """0: which rewards are asked depends on the samples, so no rate is the worker's."""
        return 0.0

    @property
    def holding_reason(self) -> str:
        """Why samples wait for their reward models, in words; empty if they do not."""
        return "; ".join(pool.holding_reason for _, pool in self._lanes if pool.holding_reason)

    @property
    def num_held_back(self) -> int:
        """Leases that wait for a reward model that does not answer."""
        return sum(lane.num_held for lane, pool in self._lanes if pool.holding_reason)

    async def run(self) -> None:
        """Score until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _, pool in self._lanes:
                group.create_task(pool.run())
            group.create_task(self._deal())

    async def _deal(self) -> None:
        while True:
            for lease in await self._source.take(max_items=MAX_TAKEN):
                self._lanes[reward_number(lease.item.metadata_json, self._by_source)][0].put(lease)
