"""Records a run's events in order: kept in memory, replayed to each reader, then followed live.

Promises:

- Events are numbered from 1 without gaps; the last one is RunFinished, exactly once.
- At most MAX_KEPT_EVENTS are kept; a reader that asks for older ones starts at the oldest kept.
- A reader never blocks the run: it reads the kept events at its own pace.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping

from penstock.clock import Clock
from penstock.v1 import trainer_pb2
from penstock.wire.timestamps import timestamp

MAX_KEPT_EVENTS = 8192
FIRST_WAITING_GAP_S, MOST_WAITING_GAP_S = 5.0, 60.0


class RunEvents:
    """The events of one run and the state they add up to."""

    def __init__(self, *, run_id: str, num_steps: int, clock: Clock) -> None:
        self.run_id = run_id
        self.num_steps = num_steps
        self.state: trainer_pb2.TrainerState.ValueType = trainer_pb2.TRAINER_STATE_STARTING
        self.message = ""
        self.policy_version = 0
        self.incarnation = secrets.token_hex(8)
        self.is_finished = False
        self.has_stepped = False
        """Whether a step was taken in this incarnation."""
        self.on_first_step: Callable[[], None] = lambda: None
        """Called after the first one."""
        self._clock = clock
        self._events: deque[trainer_pb2.WatchRunResponse] = deque(maxlen=MAX_KEPT_EVENTS)
        self._num_events = 0
        self._waited_at_s = -math.inf
        self._waiting_gap_s = FIRST_WAITING_GAP_S
        self._grown = asyncio.Event()

    def change_state(self, state: trainer_pb2.TrainerState.ValueType, message: str = "") -> None:
        """Enter a state, or report something new about it; repeating the current one is no event."""
        if (state, message) == (self.state, self.message) and self._num_events:
            return
        self.state, self.message = state, message
        self._waiting_gap_s = FIRST_WAITING_GAP_S
        self.announce()

    def say_waiting(self, message: str) -> None:
        """Report the cause of a wait, as events at growing intervals.

        A night's wait must not push the steps out of the kept events.
        """
        self.message = message
        now_s = self._clock.monotonic_s()
        if now_s - self._waited_at_s >= self._waiting_gap_s:
            self._waited_at_s = now_s
            self._waiting_gap_s = min(MOST_WAITING_GAP_S, 2 * self._waiting_gap_s)
            self.announce()

    def announce(self) -> None:
        """Record the current state and message as an event."""
        self._append(
            trainer_pb2.WatchRunResponse(state_changed=trainer_pb2.StateChanged(state=self.state, message=self.message))
        )

    def report_step(self, *, policy_version: int, metrics: Mapping[str, float]) -> None:
        """A step was taken and acknowledged."""
        self.policy_version = policy_version
        self._waiting_gap_s = FIRST_WAITING_GAP_S
        step = trainer_pb2.StepReport(policy_version=policy_version, num_steps=self.num_steps, metrics=dict(metrics))
        self._append(trainer_pb2.WatchRunResponse(step=step))
        if not self.has_stepped:
            self.has_stepped = True
            self.on_first_step()

    def report_evaluation(self, report: trainer_pb2.EvaluationReport) -> None:
        """Report held-out accuracy."""
        self._append(trainer_pb2.WatchRunResponse(evaluation=report))

    def report_checkpoint(self, *, policy_version: int, path: str) -> None:
        """A checkpoint is complete on disk."""
        self._append(
            trainer_pb2.WatchRunResponse(
                checkpoint=trainer_pb2.CheckpointWritten(policy_version=policy_version, path=path)
            )
        )

    def finish(
        self,
        outcome: trainer_pb2.RunOutcome.ValueType,
        *,
        message: str,
        summary_json: str,
        retry_delay_s: float | None = None,
    ) -> None:
        """The run ended; no events follow. Ignored if it has ended before.

        With `retry_delay_s` the trainer resumes it after that delay, as another incarnation.
        """
        if self.is_finished:
            return
        is_failed = outcome == trainer_pb2.RUN_OUTCOME_FAILED
        self.change_state(
            trainer_pb2.TRAINER_STATE_FAILED if is_failed else trainer_pb2.TRAINER_STATE_FINISHED, message
        )
        self.is_finished = True
        finished = trainer_pb2.RunFinished(outcome=outcome, message=message, summary_json=summary_json)
        if retry_delay_s is not None:
            finished.retry_delay.FromMilliseconds(round(1000 * retry_delay_s))
        self._append(trainer_pb2.WatchRunResponse(finished=finished))

    async def follow(
        self, *, from_sequence: int = 0, incarnation: str = ""
    ) -> AsyncGenerator[trainer_pb2.WatchRunResponse, None]:
        """Events from `from_sequence` of that incarnation on, all of another one, then live; ends after RunFinished."""
        wanted = max(1, from_sequence) if incarnation in ("", self.incarnation) else 1
        while True:
            grown = self._grown
            while (event := self._at(wanted)) is not None:
                wanted = event.sequence + 1
                yield event
            if self.is_finished:
                return
            await grown.wait()

    def _at(self, sequence: int) -> trainer_pb2.WatchRunResponse | None:
        """The event with that number; the oldest kept one if it was discarded, None if it has not happened yet."""
        if sequence > self._num_events:
            return None
        return self._events[max(0, sequence - self._events[0].sequence)]

    def _append(self, event: trainer_pb2.WatchRunResponse) -> None:
        self._num_events += 1
        event.sequence, event.incarnation = self._num_events, self.incarnation
        event.event_time.CopyFrom(timestamp(self._clock.now_s()))
        self._events.append(event)
        # Readers wait on the event object they saw; a new one replaces it, so that no wake-up is missed.
        self._grown.set()
        self._grown = asyncio.Event()
