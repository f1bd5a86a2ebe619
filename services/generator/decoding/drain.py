"""Waiting until nothing is decoded, for updates that must not meet running samples, no longer than is reasonable."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from penstock.errors import DeadlineError
from penstock.stall_limits import silence_limit
from services.generator.decoding.sample_runner import Rollouts

LEAST_WAIT_S = 300.0


class Drain:
    """Lets samples under way end and holds beginners back.

    Args:
        rollouts: The samples.
        max_wait_s: How long they may take to end; None derives it from what they may still need.
        sample_speed: Tokens per second of each of them, where measured.
    """

    def __init__(
        self, rollouts: Rollouts, *, max_wait_s: float | None, sample_speed: Callable[[], float | None]
    ) -> None:
        self._rollouts = rollouts
        self._max_wait_s = max_wait_s
        self._sample_speed = sample_speed

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Inside, nothing is decoded. Raises DeadlineError where that takes too long; samples then go on."""
        speed = self._sample_speed()
        limit = silence_limit(
            setting="engine.max_drain_s",
            configured_s=self._max_wait_s,
            least_s=LEAST_WAIT_S,
            max_tokens=self._rollouts.longest_remaining_tokens,
            speeds={} if speed is None else {"this engine": speed},
        )
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._rollouts.nothing_decoding(timeout_s=limit.value_s))
            except TimeoutError as error:
                raise DeadlineError(f"drain: samples under way did not end within {limit}; they go on") from error
            yield
