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


@asynccontextmanager
async def drained(
    rollouts: Rollouts, *, engine: Engine, rate: TokenRate, max_wait_s: float | None
) -> AsyncIterator[None]:
    """Inside, nothing is decoded: samples under way have ended and new ones are held back.

    Args:
        rollouts: The samples.
        engine: Decodes them.
        rate: Its tokens per second, as of the last heartbeat.
        max_wait_s: How long they may take to end; None derives it from the tokens they may still need.

    Raises:
        DeadlineError: They took longer; they go on.
    """
    speed = rate.tokens_per_second
    limit = silence_limit(
        setting="engine.max_drain_s",
        configured_s=max_wait_s,
        least_s=LEAST_WAIT_S,
        max_tokens=rollouts.longest_remaining_tokens,
        speeds={"this engine": speed / max(1, engine.stats().num_running)} if speed > 0 else {},
    )
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(rollouts.decoding.silence(timeout_s=limit.value_s))
        except TimeoutError as error:
            raise DeadlineError(f"drain: samples under way did not end within {limit}; they go on") from error
        yield
