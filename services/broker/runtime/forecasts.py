"""Asks the scheduler for forecasts of completion lengths when prompts are submitted.

Forecasts are advice: a submission never fails without them and waits TIMEOUT_S at most. After a failure the scheduler
is not asked for a while, longer each time, so that a run without one is not slowed down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.network.rpc import call, open_channel
from penstock.security import Security
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

TIMEOUT_S = 0.5
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
MAX_QUERIES = 1_024
MAX_EXPECTED_TOKENS = 1 << 24
MAX_END_TOKENS, MAX_END_CHARACTERS = 512, 1_024
"""Length of the two ends of a prompt that are sent: as much as the scheduler uses, 12 MiB at most in all."""

_Cut = TypeVar("_Cut", str, bytes)

_log = structlog.get_logger()


class Forecaster:
    """Asks one scheduler.

    Args:
        target: Its host:port; None without a scheduler.
        security: Credentials of the process.
        clock: For the back-off.
        on_answer: Called with the outcome of each request: answered, failed or skipped.
    """

    def __init__(
        self,
        target: str | None,
        *,
        security: Security,
        clock: Clock,
        on_answer: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._target = target
        self._security = security
        self._clock = clock
        self._on_answer = on_answer
        self._channel = open_channel(target, security) if target else None
        self._num_failures = 0
        self._failed_s = self._retry_s = -math.inf
        self._model_version: int | None = None

    @property
    def state(self) -> str:
        """Where lengths come from, for display."""
        if self._target is None:
            return "no scheduler is configured, lengths unknown"
        if self._num_failures:
            return "the scheduler is away, lengths unknown"
        if self._model_version is None:
            return "no forecast was asked for yet"
        model = f"model {self._model_version}" if self._model_version else "mean lengths so far"
        return f"forecasts of the scheduler ({model})"

    async def forecasts(self, run_id: str, prompts: Sequence[types_pb2.Prompt]) -> dict[str, float]:
        """Expected completion tokens by group id, where known; empty if the scheduler is unavailable."""
        if self._channel is None:
            return {}
        if self._clock.monotonic_s() < self._retry_s:
            self._on_answer("skipped")
            return {}
        asked_s = self._clock.monotonic_s()
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        request = scheduler_pb2.ForecastLengthsRequest(run_id=run_id, queries=map(_query, prompts[:MAX_QUERIES]))
        try:
            answer = await call(stub.ForecastLengths, request, peer=f"scheduler {self._target}", timeout_s=TIMEOUT_S)
        except PenstockError as error:
            self._note_failure(error, asked_s=asked_s)
            return {}
        self._note_answer(answer.model_version)
        return {
            prompt.group_id: tokens
            for prompt, forecast in zip(prompts, answer.forecasts, strict=False)
            if forecast.HasField("expected_tokens") and (tokens := usable(forecast.expected_tokens)) is not None
        }

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    def _note_failure(self, error: PenstockError, *, asked_s: float) -> None:
        self._on_answer("failed")
        if asked_s <= self._failed_s:
            # Sent while another failed: one hitch hit several runs and should not lengthen the back-off.
            return
        if not self._num_failures:
            _log.warning("scheduler away: dispatch continues without forecasts", target=self._target, error=str(error))
        backoff_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2**self._num_failures)
        self._num_failures += 1
        self._failed_s = self._clock.monotonic_s()
        self._retry_s = self._failed_s + backoff_s

    def _note_answer(self, model_version: int) -> None:
        if self._num_failures:
            _log.info("scheduler is back", target=self._target)
        self._num_failures, self._retry_s = 0, -math.inf
        self._model_version = model_version
        self._on_answer("answered")


def usable(expected_tokens: float) -> float | None:
    """A forecast as dispatch may count with it: a completion has at least one token. None if it is no length."""
    return max(1.0, expected_tokens) if 0 < expected_tokens <= MAX_EXPECTED_TOKENS else None


def _query(prompt: types_pb2.Prompt) -> scheduler_pb2.LengthQuery:
    text = prompt.text or "\n".join(turn.content for turn in prompt.messages)
    return scheduler_pb2.LengthQuery(
        group_id=prompt.group_id,
        prompt_text=_ends(text, MAX_END_CHARACTERS),
        num_prompt_tokens=len(prompt.token_ids) // 4,
        prompt_token_ids=_ends(prompt.token_ids, 4 * MAX_END_TOKENS),
    )


def _ends(whole: _Cut, most: int) -> _Cut:
    """The first and the last `most` items."""
    return whole if len(whole) <= 2 * most else whole[:most] + whole[-most:]
