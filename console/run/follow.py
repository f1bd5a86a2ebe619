"""Starts a run on its trainer, follows it through restarts of trainer and broker, and stops it.

Invariants:
- Events are taken in order, and once each within one incarnation of the run. A trainer that returns has either resumed
  the run by itself, under another incarnation, or does not know it and is asked to resume it.
- A trainer that does not answer is waited for, indefinitely unless `patience_s` is set. So is one that was drained
  (SIGTERM), or that retries by itself after a failure; but if the run was asked to stop, either of these ends it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from console.view.formats import duration
from console.view.live_display import Display
from console.view.run_view import BUSY_WINDOW_S, RunView
from penstock.clients.broker import BrokerClient
from penstock.config import ConfigError
from penstock.errors import BadTokenError, InvalidFieldError, NotOfferedError, PenstockError, UnknownRunError
from penstock.network.outage import Outage
from penstock.network.rpc import backoff_s, call_with_retry, open_channel, translated_errors
from penstock.security import Security
from penstock.v1 import broker_pb2, trainer_pb2, trainer_pb2_grpc
from penstock.wire.timestamps import unix_s
from services.trainer.config import TrainingConfig

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 1.0
_POLL_TIMEOUT_S = 3.0
# A stream is reopened from time to time: nothing waits forever on a silent peer.
_WATCH_TIMEOUT_S = 3600.0


class TrainerLostError(Exception):
    """The trainer did not answer for too long."""


class RunSession:
    """One run on the trainer at `trainer`, or at that one of several addresses where it is now.

    `make_config` is called for each start: a plan may have moved the trainer to another number of processes.
    """

    def __init__(
        self,
        make_config: Callable[[], TrainingConfig],
        *,
        trainer: str,
        security: Security,
        view: RunView,
        display: Display,
    ) -> None:
        config = make_config()
        self._run_id = config.run.id
        self._make_config = make_config
        self._trainer_peer = f"trainer {trainer}"
        self._trainer_channel = open_channel(trainer, security)
        self._trainer = trainer_pb2_grpc.TrainerServiceStub(self._trainer_channel)
        self._broker = BrokerClient(config.broker, security=security, patience_s=0.0, timeout_s=_POLL_TIMEOUT_S)
        self._view = view
        self._display = display
        self._patience_s = config.run.patience_s
        self._sequence = 0
        self._incarnation = ""
        self._is_stopping = False
        self._is_trainer_away = False
        self._ended: trainer_pb2.RunFinished | None = None
        """How the followed incarnation ended, if the run continues after it."""
        self._outage = Outage(self._trainer_peer, on_notice=self._note_outage)
        self._phase = "waiting for the trainer"
        self._state = trainer_pb2.TRAINER_STATE_UNSPECIFIED

    async def start(self, *, resume: bool) -> None:
        """Start the run on the trainer. Raises ConfigError if it refuses the configuration."""
        config_json = json.dumps(self._make_config().model_dump(mode="json"))
        request = trainer_pb2.StartRunRequest(run_id=self._run_id, config_json=config_json, resume=resume)
        self._incarnation, self._sequence, self._ended = "", 0, None
        try:
            await call_with_retry(
                self._trainer.StartRun,
                request,
                peer=self._trainer_peer,
                timeout_s=START_TIMEOUT_S,
                give_up_after_s=self._patience_s,
                outage=self._outage,
            )
        except InvalidFieldError as error:
            raise ConfigError(str(error)) from error

    async def follow(self) -> trainer_pb2.RunFinished:
        """Take in events until the run has ended. Raises TrainerLostError, ConfigError, PenstockError."""
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        delays_s = backoff_s(first_s=0.2, most_s=2.0)
        while True:
            before = (self._incarnation, self._sequence)
            try:
                finished = await self._watch()
                answered_s = loop.time()
                if finished is not None and not self._goes_on(finished):
                    return finished
            except UnknownRunError:
                if self._is_stopping:
                    raise TrainerLostError(
                        f"{self._trainer_peer} was restarted while the run was stopped; its last checkpoint remains"
                    ) from None
                self._display.note("trainer restarted: resumes from its newest checkpoint")
                await self.start(resume=True)
            except PenstockError as error:
                # A dying server ends its streams with various codes; only these mean that a retry is useless.
                if isinstance(error, (InvalidFieldError, BadTokenError, NotOfferedError)):
                    raise
                self._outage.failed(error)
                self._view.phase = self._outage.described(error)
            if self._is_stopping and self._ended is not None:
                return self._ended
            if (self._incarnation, self._sequence) != before:
                answered_s = loop.time()
                delays_s = backoff_s(first_s=0.2, most_s=2.0)
            if self._patience_s is not None and loop.time() - answered_s > self._patience_s:
                raise TrainerLostError(
                    f"{self._trainer_peer} did not answer for {self._patience_s:g} s (run.patience_s)"
                )
            await asyncio.sleep(next(delays_s))

    def _goes_on(self, finished: trainer_pb2.RunFinished) -> bool:
        """Whether the run will be resumed automatically, by this trainer or by its replacement."""
        self._ended = finished
        if self._is_stopping:
            return False
        if finished.outcome == trainer_pb2.RUN_OUTCOME_DRAINED:
            self._view.phase = "the trainer was stopped by a signal; waiting for it to come back"
            self._display.note(f"{self._view.phase} (Ctrl-C ends the run here)")
            return True
        if finished.outcome == trainer_pb2.RUN_OUTCOME_FAILED and finished.HasField("retry_delay"):
            delay_s = finished.retry_delay.ToMilliseconds() / 1000
            self._view.phase = f"the run failed and the trainer tries again in {duration(delay_s)}: {finished.message}"
            self._display.note(self._view.phase)
            return True
        return False

    async def stop(self) -> None:
        """Ask the trainer to stop after the step under way; `follow` then returns. Raises PenstockError."""
        self._is_stopping = True
        request = trainer_pb2.StopRunRequest(run_id=self._run_id)
        try:
            await call_with_retry(
                self._trainer.StopRun, request, peer=self._trainer_peer, timeout_s=5.0, give_up_after_s=STOP_TIMEOUT_S
            )
        except PenstockError:
            # A drained trainer need not return for this: its checkpoint is written.
            if self._ended is None:
                raise

    async def poll(self) -> None:
        """Update the broker's state in the view until cancelled."""
        while True:
            self._view.set_run(await self._get_run())
            self._display.tick()
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Close the channels."""
        await self._trainer_channel.close()
        await self._broker.close()

    def _note_outage(self, text: str) -> None:
        self._view.phase = text or self._phase
        if bool(text) != self._is_trainer_away:
            self._is_trainer_away = bool(text)
            self._display.note(text or f"{self._trainer_peer} is back")

    async def _get_run(self) -> broker_pb2.GetRunResponse | None:
        # By the run's clock, once it is known.
        last = self._view.run
        now_s = time.time() if last is None else unix_s(last.now_time)
        try:
            return await self._broker.get_run(self._run_id, busy_since_s=now_s - BUSY_WINDOW_S)
        except PenstockError:
            # The view shows that the broker does not answer; the run itself waits for it.
            return None

    async def _watch(self) -> trainer_pb2.RunFinished | None:
        request = trainer_pb2.WatchRunRequest(
            run_id=self._run_id, from_sequence=self._sequence + 1, incarnation=self._incarnation
        )
        async with translated_errors(self._trainer_peer):
            stream: Any = self._trainer.WatchRun(request, timeout=_WATCH_TIMEOUT_S)
            event: trainer_pb2.WatchRunResponse
            async for event in stream:
                if self._incarnation not in ("", event.incarnation):
                    self._display.note("the trainer restarts from its newest checkpoint")
                    self._ended = None
                self._incarnation, self._sequence = event.incarnation, event.sequence
                self._outage.answered()
                self._take(event)
                if event.WhichOneof("event") == "finished":
                    return event.finished
        return None

    def _take(self, event: trainer_pb2.WatchRunResponse) -> None:
        # Any event means that it answers again.
        self._view.phase = self._phase
        match event.WhichOneof("event"):
            case "state_changed":
                self._take_state(event.state_changed)
            case "step":
                self._display.step(self._view.add_step(event.step, time_s=unix_s(event.event_time)))
            case "evaluation":
                self._view.evaluations.append(event.evaluation)
                self._display.note(_evaluation_line(event.evaluation))
            case "checkpoint":
                self._display.note(f"checkpoint of step {event.checkpoint.policy_version}: {event.checkpoint.path}")

    def _take_state(self, change: trainer_pb2.StateChanged) -> None:
        state = trainer_pb2.TrainerState.Name(change.state).removeprefix("TRAINER_STATE_").lower()
        phase = f"{state}: {change.message}" if change.message else state
        # While it trains, its message states what it waits for and changes every few seconds: only the view needs that.
        is_news = change.state != self._state or change.state == trainer_pb2.TRAINER_STATE_STARTING
        self._state = change.state
        self._phase = self._view.phase = phase
        if is_news:
            self._display.note(f"trainer {phase}")


def _evaluation_line(report: trainer_pb2.EvaluationReport) -> str:
    parts = [f"sampled {report.sampled_accuracy:.3f}"] if report.HasField("sampled_accuracy") else []
    parts += [f"greedy {report.greedy_accuracy:.3f}"] if report.HasField("greedy_accuracy") else []
    return f"held-out accuracy at step {report.policy_version}: {', '.join(parts) or 'not measured'}"
