"""Whom the broker asks for forecasts, and when it leaves a scheduler alone."""

from __future__ import annotations

import asyncio

from penstock.clock import ManualClock
from penstock.security import Security
from penstock.v1 import types_pb2
from services.broker.runtime.forecasts import MIN_BACKOFF_S, Forecaster

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
