"""Waits until nothing is decoded, within a deadline, for updates that must not meet running samples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from penstock.errors import DeadlineError
from penstock.stall_limits import silence_limit
from services.generator.decoding.sample_runner import Rollouts
from services.generator.decoding.token_rate import TokenRate
from services.generator.engine.engine import Engine

LEAST_WAIT_S = 300.0


class Drain:
    """Lets samples under way end and holds new ones back.

    Args:
        rollouts: The samples.
        engine: Decodes them.
        rate: Its tokens per second, as of the last heartbeat.
        max_wait_s: How long they may take to end; None derives it from the tokens they may still need.
    """

    def __init__(self, rollouts: Rollouts, *, engine: Engine, rate: TokenRate, max_wait_s: float | None) -> None:
        self._rollouts = rollouts
        self._engine = engine
        self._rate = rate
        self._max_wait_s = max_wait_s

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Inside, nothing is decoded. Raises DeadlineError if that takes too long; samples then continue."""
        rate = self._rate.tokens_per_second
        per_sample = rate / max(1, self._engine.stats().num_running)
        limit = silence_limit(
            setting="engine.max_drain_s",
            configured_s=self._max_wait_s,
            least_s=LEAST_WAIT_S,
            max_tokens=self._rollouts.longest_remaining_tokens,
            speeds={"this engine": per_sample} if rate > 0 else {},
        )
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._rollouts.nothing_decoding(timeout_s=limit.value_s))
            except TimeoutError as error:
                raise DeadlineError(f"drain: samples under way did not end within {limit}; they go on") from error
            yield
