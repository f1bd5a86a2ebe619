"""Holds work back while a reward model does not answer, instead of using up its attempts.

    CLOSED --(away, or FAILURES_TO_OPEN failures in a row)--> OPEN --(one batch succeeds)--> CLOSED

Invariants:
- While open, one batch at a time is let through, and only after the model answered a probe; the others wait their turn.
- A failed batch passes its turn to the next one, so a batch that breaks the model cannot starve the rest.
- Waiting is logged, less and less often: which model, since when, how many samples, why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from penstock.network.rpc import backoff_s
from penstock.rewards import ModelAwayError, RewardModel

FAILURES_TO_OPEN = 3
_MOST_BETWEEN_PROBES_S = 3.0
_FIRST_REPEAT_S, _MOST_BETWEEN_LOGS_S = 10.0, 60.0

_log = structlog.get_logger()


class Breaker:
    """The circuit breaker of one reward model."""

    def __init__(
        self,
        model: RewardModel,
        *,
        num_waiting: Callable[[], int],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_waiting` returns the number of waiting samples, for the log."""
        self._model = model
        self._num_waiting = num_waiting
        self._monotonic_s = monotonic_s
        self._turn = asyncio.Lock()  # first come, first served
        self.num_successes = 0
        self._num_failures = 0
        self._open_since_s: float | None = None
        self._reason, self._what = "", "is unreachable"
        self._log_at_s = 0.0
        self._log_every_s = _FIRST_REPEAT_S

    @property
    def is_open(self) -> bool:
        """Whether work is held back."""
        return self._open_since_s is not None

    @property
    def reason(self) -> str:
        """Why work is held back, in words; empty if it is not."""
        return f"reward model {self._model.name} {self._what}: {self._reason}" if self.is_open else ""

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        """Inside, one batch may be tried; entering waits while the model is away."""
        while self.is_open:
            async with self._turn:
                if self.is_open:
                    await self._until_it_answers()
                    yield
                    return
        yield

    def succeeded(self) -> None:
        """A batch was scored."""
        self.num_successes += 1
        self._num_failures = 0
        if self._open_since_s is not None:
            open_s = self._monotonic_s() - self._open_since_s
            self._open_since_s = None
            _log.info(f"reward model {self._model.name} answers again after {open_s:.0f} s")

    def failed(self, reason: str, *, is_away: bool, what: str = "is unreachable") -> None:
        """A batch could not be scored; `is_away` if there was no answer at all, which holds work back at once.

        `what` is how the model fails, in words.
        """
        self._num_failures += 1
        self._reason, self._what = reason, what
        if self._open_since_s is not None:
            self._say(reason)
        elif is_away or self._num_failures >= FAILURES_TO_OPEN:
            self._open_since_s = self._log_at_s = self._monotonic_s()
            self._log_every_s = _FIRST_REPEAT_S
            self._say(reason)

    async def _until_it_answers(self) -> None:
        for delay_s in backoff_s(first_s=0.2, most_s=_MOST_BETWEEN_PROBES_S):
            try:
                await self._model.probe()
                return
            except ModelAwayError as error:
                self._say(str(error))
            await asyncio.sleep(delay_s)

    def _say(self, reason: str) -> None:
        now_s = self._monotonic_s()
        if self._open_since_s is None or now_s < self._log_at_s:
            return
        _log.warning(
            f"reward model {self._model.name} {self._what}, since {now_s - self._open_since_s:.0f} s; "
            f"{self._num_waiting()} samples wait",
            reason=reason,
        )
        self._log_at_s = now_s + self._log_every_s
        self._log_every_s = min(_MOST_BETWEEN_LOGS_S, self._log_every_s * 2)
