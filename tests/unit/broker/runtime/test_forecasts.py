"""Whom the broker asks for forecasts, and when it leaves a scheduler alone."""

from __future__ import annotations

import asyncio
import math

import pytest

from penstock.clock import ManualClock
from penstock.security import Security
from penstock.v1 import types_pb2
from services.broker.runtime.forecasts import MAX_EXPECTED_TOKENS, MIN_BACKOFF_S, Forecaster, usable

PROMPTS = [types_pb2.Prompt(group_id="g", token_ids=b"\0\0\0\0")]
NOBODY = "127.0.0.1:1"


async def ask(forecaster: Forecaster, *, times: int = 1) -> None:
    await asyncio.gather(*(forecaster.forecasts(f"run-{index}", PROMPTS) for index in range(times)))


async def test_questions_that_fail_together_are_one_failure() -> None:
    clock, outcomes = ManualClock(), []
    forecaster = Forecaster(NOBODY, security=Security(), clock=clock, on_answer=outcomes.append)
    await ask(forecaster, times=8)
    await ask(forecaster)
    assert outcomes == ["failed"] * 8 + ["skipped"]
    clock.advance(MIN_BACKOFF_S + 0.1)
    await ask(forecaster)
    assert outcomes[9:] == ["failed"]
    clock.advance(MIN_BACKOFF_S + 0.1)
    await ask(forecaster)
    assert outcomes[10:] == ["skipped"]
    await forecaster.close()


@pytest.mark.parametrize(
    ("expected_tokens", "counted"),
    [
        (1e-45, 1.0),
        (700.5, 700.5),
        (MAX_EXPECTED_TOKENS, MAX_EXPECTED_TOKENS),
        *((wrong, None) for wrong in (0.0, -1.0, 2 * MAX_EXPECTED_TOKENS, math.inf, math.nan)),
    ],
)
def test_a_forecast_counts_if_a_completion_can_be_that_long(expected_tokens: float, counted: float | None) -> None:
    assert usable(expected_tokens) == counted
