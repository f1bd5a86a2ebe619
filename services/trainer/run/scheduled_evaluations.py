"""When a run's policy is measured: alone at the start and the end, and beside training every `run.eval_every_steps`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from penstock.v1 import trainer_pb2
from services.trainer.reporting.events import RunEvents
from services.trainer.run.context import RunContext
from services.trainer.run.evaluation import Evaluator

_log = structlog.get_logger()


class ScheduledEvaluations:
    """Those of one run; at most one goes on at a time."""

    def __init__(self, evaluator: Evaluator, *, context: RunContext, history: int, events: RunEvents) -> None:
        self._evaluator = evaluator
        self._context = context
        self._history = history
        self._events = events
        self._beside: asyncio.Task[None] | None = None

    async def measure(self) -> None:
        """Measure the present version while nothing else goes on."""
        version = self._context.progress.policy_version
        self._events.change_state(trainer_pb2.TRAINER_STATE_EVALUATING, f"version {version}")
        await self._measure(version, on_waiting=self._events.say_waiting)

    def begin_if_due(self) -> None:
        """Begin to measure the version that a step made, if it is one of those; raises what the one before raised."""
        run, version = self._context.config.run, self._context.progress.policy_version
        if self._beside is not None and self._beside.done():
            self._beside.result()
            self._beside = None
        is_due = run.eval_every_steps > 0 and version % run.eval_every_steps == 0 and version < run.num_steps
        if is_due and self._beside is not None:
            _log.warning("an evaluation is left out: the last one is still under way", policy_version=version)
        elif is_due:
            self._beside = asyncio.create_task(self._measure(version, on_waiting=lambda _reason: None))

    async def finish(self) -> None:
        """Wait for the one that goes on beside training; raises what it raised."""
        if self._beside is not None:
            await self._beside

    async def cancel(self) -> None:
        """Give it up."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)

    async def _measure(self, version: int, *, on_waiting: Callable[[str], None]) -> None:
        if self._evaluator.has_prompts:
            report = await self._evaluator.measure(policy_version=version, history=self._history, on_waiting=on_waiting)
            self._events.report_evaluation(report)
