"""Holds samples back while canaries are not scored as they are known to be.

    UNKNOWN --(a round passes)--> PASSING --(`every` samples, then a round)--> PASSING or DRIFTED
    UNKNOWN, DRIFTED --(a round drifts: again, with back-off)--> DRIFTED --(a round passes)--> PASSING

Invariants:
- No sample begins to be scored before the first round has passed, nor while the last one drifted.
- What was being scored when a drift was found is not answered, but scored again once canaries pass.
- One round runs at a time. While it does, other samples go on being scored; their scores wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog

from penstock.network.rpc import backoff_s
from penstock.v1 import broker_pb2
from services.reward.canaries.known import Canary
from services.reward.metrics import CANARIES, IS_DRIFTED

FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0

Score = Callable[[Sequence[broker_pb2.ScoringLease]], Awaitable[list[broker_pb2.ScoreResult]]]

_log = structlog.get_logger()


class CanaryWatch:
    """Watches one reward model."""

    def __init__(
        self,
        canaries: Sequence[Canary],
        *,
        every: int,
        score: Score,
        name: Callable[[], str],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`score` scores leases as those of samples are; `name` returns the reward model's."""
        self._canaries = canaries
        self._every = every
        self._score = score
        self._name = name
        self._monotonic_s = monotonic_s
        self._round = asyncio.Lock()
        self._is_passing = False
        self._num_since = 0
        self._drift = ""
        self.num_drifts = 0
        """Times that canaries passed and then drifted."""

    @property
    def reason(self) -> str:
        """Why samples wait, in words; empty if they do not, or if the first round only runs yet."""
        return f"reward model {self._name()} drifts: {self._drift}" if self._drift else ""

    async def admit(self, num_samples: int) -> None:
        """Return when that many samples may begin to be scored."""
        self._num_since += num_samples
        while not self._is_passing or self._num_since > self._every:
            if self._is_passing and self._round.locked():
                return  # another task runs the round that is due
            async with self._round:
                if not self._is_passing or self._num_since > self._every:
                    await self._until_they_pass(num_samples)
                    # Also more samples than `every`: they are what that round was for.
                    return

    async def vouches(self, num_drifts: int) -> bool:
        """Whether scores count that were begun when `num_drifts` was this; returns after a round under way."""
        async with self._round:
            return num_drifts == self.num_drifts

    async def _until_they_pass(self, num_samples: int) -> None:
        begun_s = self._monotonic_s()
        for pause_s in backoff_s(first_s=FIRST_PAUSE_S, most_s=MOST_PAUSE_S):
            drifts = await drifts_of(self._canaries, self._score)
            CANARIES.labels(self._name(), "drifted" if drifts else "passed").inc()
            if not drifts:
                break
            self._found(drifts)
            await asyncio.sleep(pause_s)
        if self._drift:
            _log.info(f"canaries of reward model {self._name()} pass again after {self._monotonic_s() - begun_s:.0f} s")
        self._drift, self._num_since = "", num_samples
        IS_DRIFTED.labels(self._name()).set(0)
        self._is_passing = True

    def _found(self, drifts: Sequence[str]) -> None:
        is_new = not self._drift
        self._drift = f"{len(drifts)} of {len(self._canaries)} canaries: {drifts[0]}"
        if self._is_passing:
            self.num_drifts += 1
            self._is_passing = False
        IS_DRIFTED.labels(self._name()).set(1)
        if is_new:
            _log.warning(
                f"{self.reason}; samples wait until canaries pass",
                num_begun_since_they_passed=self._num_since,
                others=list(drifts[1:4]),
            )


async def drifts_of(canaries: Sequence[Canary], score: Score) -> list[str]:
    """Score all of them once; how each that drifts does, in words."""
    leases = [canary.lease() for canary in canaries]
    scores = {result.lease_id: result.score for result in await score(leases)}
    pairs = zip(canaries, leases, strict=True)
    return [words for canary, lease in pairs if (words := canary.drift(scores[lease.lease_id]))]
