"""What happened in a run, in order: kept in memory, replayed to whoever asks, then followed live.

Promises:

- Events are numbered from 1 without gaps; RunFinished is the last one and comes exactly once.
- At most MAX_KEPT_EVENTS are kept; a reader that asks for older ones starts at the oldest kept.
- A reader never blocks the run: it reads the kept events at its own pace.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping

from penstock.clients.broker import timestamp
from penstock.clock import Clock
from penstock.v1 import trainer_pb2

MAX_KEPT_EVENTS = 8192


class RunEvents:
    """The events of one run and the state they add up to."""

    def __init__(self, *, run_id: str, num_steps: int, clock: Clock) -> None:
        self.run_id = run_id
        self.num_steps = num_steps
        self.state: trainer_pb2.TrainerState.ValueType = trainer_pb2.TRAINER_STATE_STARTING
        self.message = ""
        self.policy_version = 0
        self.is_finished = False
        self._clock = clock
        self._events: deque[trainer_pb2.WatchRunResponse] = deque(maxlen=MAX_KEPT_EVENTS)
        self._num_events = 0
        self._grown = asyncio.Event()

    def change_state(self, state: trainer_pb2.TrainerState.ValueType, message: str = "") -> None:
        """Enter a state, or say something new about it; repeating the present one is no event."""
        if (state, message) == (self.state, self.message) and self._num_events:
            return
        self.state, self.message = state, message
        self.announce()

    def announce(self) -> None:
        """Make an event of the present state and message."""
        self._append(state_changed=trainer_pb2.StateChanged(state=self.state, message=self.message))

    def report_step(self, *, policy_version: int, metrics: Mapping[str, float]) -> None:
        """A step was taken and acknowledged."""
        self.policy_version = policy_version
        step = trainer_pb2.StepReport(policy_version=policy_version, num_steps=self.num_steps, metrics=dict(metrics))
        self._append(step=step)

    def report_evaluation(self, report: trainer_pb2.EvaluationReport) -> None:
        """Held-out accuracy was measured."""
        self._append(evaluation=report)

    def report_checkpoint(self, *, policy_version: int, path: str) -> None:
        """A checkpoint is complete on disk."""
        self._append(checkpoint=trainer_pb2.CheckpointWritten(policy_version=policy_version, path=path))

    def finish(self, outcome: trainer_pb2.RunOutcome.ValueType, *, message: str, summary_json: str) -> None:
        """The run ended; nothing follows. Ignored when it ended before."""
        if self.is_finished:
            return
        is_failed = outcome == trainer_pb2.RUN_OUTCOME_FAILED
        self.change_state(
            trainer_pb2.TRAINER_STATE_FAILED if is_failed else trainer_pb2.TRAINER_STATE_FINISHED, message
        )
        self.is_finished = True
        self._append(finished=trainer_pb2.RunFinished(outcome=outcome, message=message, summary_json=summary_json))

    async def follow(self, *, from_sequence: int = 0) -> AsyncIterator[trainer_pb2.WatchRunResponse]:
        """Events from `from_sequence` on, then live; ends after RunFinished."""
        wanted = max(1, from_sequence)
        while True:
            grown = self._grown
            while (event := self._at(wanted)) is not None:
                wanted = event.sequence + 1
                yield event
            if self.is_finished:
                return
            await grown.wait()

    def _at(self, sequence: int) -> trainer_pb2.WatchRunResponse | None:
        """The event with that number, the oldest kept when it is gone, None when it has not happened."""
        if sequence > self._num_events:
            return None
        return self._events[max(0, sequence - self._events[0].sequence)]

    def _append(
        self,
        *,
        state_changed: trainer_pb2.StateChanged | None = None,
        step: trainer_pb2.StepReport | None = None,
        evaluation: trainer_pb2.EvaluationReport | None = None,
        checkpoint: trainer_pb2.CheckpointWritten | None = None,
        finished: trainer_pb2.RunFinished | None = None,
    ) -> None:
        self._num_events += 1
        self._events.append(
            trainer_pb2.WatchRunResponse(
                sequence=self._num_events,
                event_time=timestamp(self._clock.now_s()),
                state_changed=state_changed,
                step=step,
                evaluation=evaluation,
                checkpoint=checkpoint,
                finished=finished,
            )
        )
        # Readers wait on the event they saw; a fresh one takes its place, so that no wake-up is missed or shared.
        self._grown.set()
        self._grown = asyncio.Event()
