"""The optimiser steps of a run: pull scored groups, accumulate as they come, step, acknowledge, publish.

    pull --> decode --> forward/backward --+--> optimiser step --> AckStep --> publish (beside the next step)
      ^------------ until groups_per_step -+

Promises:

- A group is trained on in exactly one step of the surviving history: one in the step log is never trained again.
- The optimiser step and the progress that records it are atomic: a stop falls before or after both.
- AckStep precedes the publication of the weights, because the broker refuses tokens of versions it does not know. A
  crash in between is harmless: the broker decides what the version is, and the step log tells it the steps it missed.
- A group without a trainable sample is dropped at the broker with its reason, and another takes its place. The same
  happens to groups that made a loss or gradient non-finite, as far as the configuration allows: the step then restarts
  with the others, from the same weights, and is exactly a step that those groups were never part of.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from penstock.errors import (
    DeadlineError,
    FencedError,
    InvalidFieldError,
    LeaseLostError,
    OtherInstanceError,
    UnknownSampleError,
    VersionConflictError,
)
from penstock.process.tasks import uninterrupted
from penstock.v1 import types_pb2
from services.trainer.batches.group_decoder import training_samples
from services.trainer.batches.training_sample import TrainingSample
from services.trainer.compute.compute_thread import ComputeThread, Interrupt
from services.trainer.model.backend import Backend, NonFiniteError, StepBackend
from services.trainer.publishing.publisher import WeightPublisher
from services.trainer.reporting.events import RunEvents
from services.trainer.reporting.logprob_gaps import GapFile
from services.trainer.reporting.metrics import SKIPPED_STEPS, JsonLines, Line, StepTimes, count_step, step_line
from services.trainer.reporting.stall_timer import Cause, StallTimer
from services.trainer.reporting.step_trace import StepTrace
from services.trainer.run.context import RunContext
from services.trainer.run.replay_feed import ReplayFeed
from services.trainer.run.stall_watch import StallWatch
from services.trainer.step.critic_apart import CriticApart
from services.trainer.step.sample_filter import SkippedSample, SkipReason
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_report import StepReport
from services.trainer.step.step_settings import step_settings

CONSUMER_ID = "trainer-0"
LEAST_SILENCE_S = 1800.0
"""Without any new group for this long, or longer where completions are (`penstock.stall_limits`), the run fails."""
POLL_S = 0.5
RESTATE_S = 15.0
"""Without a group for this long, the last steps are sent to the broker again: if its Redis lost some, it holds back
generators that are ahead of it, and no group would ever arrive to reveal the loss."""

_log = structlog.get_logger()
Groups = dict[str, list[TrainingSample]]


@dataclass(slots=True, kw_only=True)
class _OpenStep:
    """The current step."""

    step: TrainingStep
    num_skipped: int
    """Earlier attempts at it, from the same weights."""
    groups: Groups = field(default_factory=dict)
    """The groups that it trains on; unusable samples are left out once checked."""

    report: StepReport | None = None
    """The result of the optimiser step, once it is done."""


class StepLoop:
    """Takes the steps of one run."""

    def __init__(
        self,
        *,
        context: RunContext,
        compute: ComputeThread,
        backend: Backend,
        interrupt: Interrupt,
        publisher: WeightPublisher,
        events: RunEvents,
        metrics: JsonLines,
        replay: ReplayFeed | None = None,
    ) -> None:
        self._context = context
        self._compute = compute
        self._backend = backend
        self._of_step: StepBackend = backend
        if context.critic is not None:
            peak = context.config.optimizer.learning_rate
            self._of_step = CriticApart(backend, context.critic, peak_learning_rate=peak)
        self._interrupt = interrupt
        self._publisher = publisher
        self._events = events
        self._metrics = metrics
        self._replay = replay
        self.on_step: Callable[[Iterable[Sequence[TrainingSample]]], None] = lambda groups: None
        """Called with the groups of each optimiser step when the progress has counted it."""
        self.order_metrics: Callable[[], Line] = dict
        """Called for each step's line: where the order of prompts is."""
        self.gaps: GapFile | None = None
        """Keeps the log-prob gaps of each step."""
        self._received: deque[types_pb2.TrajectoryGroup] = deque()
        self.waits = StallTimer(context.clock)
        self.trace = StepTrace(context.run_id, context.clock)
        self.waits.on_wait = self.trace.note_wait
        compute.listeners.append(self.trace.note_computing)
        self._stall = StallWatch(
            context,
            setting="trainer.max_silence_s",
            configured_s=context.config.trainer.max_silence_s,
            least_s=LEAST_SILENCE_S,
        )
        self._line_s = context.clock.monotonic_s()
        self._busy_at_line_s = compute.busy_s
        self._stepped_s = self._line_s
        """When the last optimiser step ended."""
        groups_per_step = context.config.algorithm.prompts_per_step
        self.session = context.client.consumer(
            context.run_id,
            CONSUMER_ID,
            max_groups=min(context.config.trainer.max_groups_per_microbatch, groups_per_step),
            # The broker hands out at most one step until that is acknowledged. Credit for the next one lets the
            # commit of the acknowledgement begin it, without a round trip for the credit.
            max_held_groups=2 * groups_per_step,
        )

    async def take_step(self) -> None:
        """One step, acknowledged and being published.

        Raises:
            BackendError: A loss or gradient was not finite, and not for the first time; nothing changed.
            DeadlineError: No new group for `trainer.max_silence_s`, or for the limit derived in its place.
            PenstockError: The broker refused something for good, or was away for too long.
        """
        num_skipped, kept = 0, await self._attempt({}, num_skipped=0)
        while kept is not None:
            num_skipped += 1
            kept = await self._attempt(kept, num_skipped=num_skipped)
        with self.waits.waiting(Cause.PUBLISHING):
            await self._publisher.finish()
            progress, backend = self._context.progress, self._backend
            place = {"policy_version": progress.policy_version, "history": progress.history}
            written = await self._compute.run(backend.write_weights, self._publisher.path(**place))
            self._publisher.begin(written, **place, adapter=backend.adapter, stepped_s=self._stepped_s)

    async def _attempt(self, kept: Groups, *, num_skipped: int) -> Groups | None:
        """Attempt a step that begins with the groups in `kept`; returns those of the next one, None after success."""
        config, version = self._context.config, self._context.progress.policy_version
        settings = step_settings(config, policy_version=version)
        step = TrainingStep(self._of_step, settings, check=self._interrupt.check)
        open_step = _OpenStep(step=step, num_skipped=num_skipped)
        try:
            await self._fill(open_step, kept)
            async with self._context.version_lock:
                await self._take(open_step)
            return None
        except NonFiniteError as error:
            if num_skipped >= config.trainer.max_skips_in_a_row:
                raise
            return await self._without_suspects(open_step.groups, error)
        finally:
            # An unfinished step must leave no gradients behind.
            await self._compute.run(open_step.step.abandon)

    async def _take(self, open_step: _OpenStep) -> None:
        """The optimiser step and its acknowledgement, and its line in the metrics.

        A step that was interrupted before the broker answered gets its line; one that was refused because another
        trainer has the run gets none: the files, and the step of that number, belong to the successor.
        """
        try:
            await uninterrupted(self._finish(open_step))
            with self.waits.waiting(Cause.ACKNOWLEDGING):
                await self._acknowledge(tuple(open_step.groups))
        except (FencedError, OtherInstanceError):
            open_step.report = None
            raise
        finally:
            if open_step.report is not None:
                line = self._line(open_step, open_step.report)
                place = self._context.progress
                self.trace.finish(open_step.groups, policy_version=place.policy_version, history=place.history)
                self._metrics.append(line)
                if self.gaps is not None:
                    self.gaps.add(
                        open_step.report.gaps,
                        tuple(open_step.groups),
                        policy_version=place.policy_version,
                        history=place.history,
                    )
                self._events.report_step(policy_version=self._context.progress.policy_version, metrics=line)

    async def _fill(self, open_step: _OpenStep, kept: Groups) -> None:
        """Add groups, first those in `kept`, until there are enough for a step."""
        num_wanted = self._context.config.algorithm.prompts_per_step
        if not open_step.num_skipped:
            # A retry leaves out replayed groups: they may be at fault, and are not needed.
            await self._add_replayed(open_step.step)
        if kept:
            await self._add(open_step, kept)
        while len(open_step.groups) < num_wanted:
            with self.waits.waiting(Cause.SAMPLES):
                groups = await self._next_groups(num_wanted - len(open_step.groups))
            await self._add(open_step, await self._decoded(groups))

    async def _without_suspects(self, groups: Groups, error: NonFiniteError) -> Groups:
        """Drops the groups that may be at fault and returns the others."""
        suspects = [group_id for group_id in error.group_ids if group_id in groups]
        replayed = [group_id for group_id in error.group_ids if group_id not in groups]
        if replayed and self._replay is not None:
            # The next attempt is made without them, and shows whether the fresh ones are at fault.
            self._replay.forget(replayed)
            suspects = []
        _log.warning("a step is begun again without some groups", reason=error.reason, error=str(error))
        SKIPPED_STEPS.labels(reason=error.reason).inc()
        if suspects:
            await self._drop(suspects, reason=error.reason)
        return {group_id: samples for group_id, samples in groups.items() if group_id not in suspects}

    async def _add_replayed(self, step: TrainingStep) -> None:
        """Train again on groups of earlier steps, if there are any, before the first fresh one arrives."""
        if self._replay is not None:
            wanted = self._context.config.algorithm.num_replayed_groups
            version = self._context.progress.policy_version
            with self.waits.waiting(Cause.SAMPLES):
                groups = await self._replay.draw(wanted, policy_version=version)
            await self._compute.run(step.add_replayed, groups)

    async def _refresh_reference(self) -> None:
        """Make the current weights the reference, every `reference_refresh_steps` versions."""
        every = self._context.config.algorithm.reference_refresh_steps
        if every and self._context.progress.policy_version % every == 0:
            await self._compute.run(self._backend.refresh_reference)

    async def _finish(self, open_step: _OpenStep) -> None:
        report = await self._compute.run(open_step.step.finish)
        self._stepped_s = self._context.clock.monotonic_s()
        progress = self._context.progress
        progress.record_step(
            {group_id: [sample.sample_index for sample in samples] for group_id, samples in open_step.groups.items()}
        )
        self.on_step(open_step.groups.values())
        progress.num_samples += report.num_samples
        progress.num_response_tokens += report.num_completion_tokens
        progress.max_staleness_seen = max(progress.max_staleness_seen, *report.staleness)
        open_step.report = report
        await self._refresh_reference()

    async def _acknowledge(self, group_ids: Sequence[str]) -> None:
        version = self._context.progress.policy_version
        try:
            await self._context.client.ack_step(
                self._context.run_id, consumer_id=CONSUMER_ID, group_ids=group_ids, policy_version=version
            )
        except (VersionConflictError, LeaseLostError, UnknownSampleError) as error:
            # A broker whose Redis lost its latest writes is behind, by a version or only by the delivery of these
            # groups; the step log, which includes this step, brings it up to date.
            _log.warning("the broker is behind and is sent the last steps again", error=str(error))
            await self._context.open_run(version)
        self._context.progress.acked_version = version
        self.session.release(group_ids)

    async def _next_groups(self, max_groups: int) -> list[types_pb2.TrajectoryGroup]:
        """At least one and at most `max_groups` groups, none of which was trained on."""
        self._stall.restart()
        stated_s = self._context.clock.monotonic_s()
        while not self._received:
            microbatch = await self.session.next(timeout_s=POLL_S)
            if microbatch is not None:
                groups = await self._without_trained(list(microbatch.groups))
                self.trace.note_groups(groups)
                self._received.extend(groups)
                continue
            if self.session.is_away:
                self._stall.restart()
            elif (limit := await self._stall.exceeded()) is not None:
                raise DeadlineError(f"no sample group came for {limit}; last word: {self.session.waiting_reason}")
            elif self._context.clock.monotonic_s() - stated_s > RESTATE_S:
                await self._restate_steps()
                stated_s = self._context.clock.monotonic_s()
            self._events.say_waiting(self.session.waiting_reason)
        return [self._received.popleft() for _ in range(min(max_groups, len(self._received)))]

    async def _without_trained(self, groups: list[types_pb2.TrajectoryGroup]) -> list[types_pb2.TrajectoryGroup]:
        trained = {group_id for step in self._context.progress.step_log for group_id in step.group_ids}
        again = [group.prompt.group_id for group in groups if group.prompt.group_id in trained]
        if again:
            _log.warning("trained groups were handed out again: the broker lost a step", group_ids=again[:5])
            await self._restate_steps()
            self.session.release(again)
        return [group for group in groups if group.prompt.group_id not in trained]

    async def _restate_steps(self) -> None:
        """Bring a broker that lost steps up to the trainer's version; changes nothing if it lost none."""
        async with self._context.version_lock:
            await self._context.open_run(self._context.progress.acked_version)

    async def _decoded(self, groups: Sequence[types_pb2.TrajectoryGroup]) -> Groups:
        """The samples of the groups; unreadable groups are dropped."""
        decoded: Groups = {}
        for group in groups:
            try:
                decoded[group.prompt.group_id] = training_samples(group, routing=self._context.routing)
            except InvalidFieldError as error:
                _log.warning("a group cannot be read", group_id=group.prompt.group_id, error=str(error))
                await self._drop([group.prompt.group_id], reason=SkipReason.MALFORMED.value)
        return decoded

    async def _add(self, open_step: _OpenStep, groups: Groups) -> None:
        # Recorded before they are checked, so that the step knows its groups on any error.
        open_step.groups |= groups
        left_out = await self._compute.run(open_step.step.add_groups, list(groups.values()))
        reasons = _unusable_groups(groups, left_out)
        for group_id, reason in reasons.items():
            await self._drop([group_id], reason=reason)
            del open_step.groups[group_id]
        skipped = {(sample.group_id, sample.sample_index) for sample in left_out}
        for group_id in groups.keys() - reasons.keys():
            open_step.groups[group_id] = [s for s in groups[group_id] if (s.group_id, s.sample_index) not in skipped]

    async def _drop(self, group_ids: Sequence[str], *, reason: str) -> None:
        await self._context.client.drop_groups(self._context.run_id, group_ids, reason=reason)
        for group_id in group_ids:
            self._context.progress.outstanding.pop(group_id, None)
        self.session.release(group_ids)

    def _line(self, open_step: _OpenStep, report: StepReport) -> Line:
        clock = self._context.clock
        at_s = clock.monotonic_s()
        critic_s = 0.0 if self._context.critic is None else self._context.critic.take_waited_s()
        self.waits.add(Cause.CRITIC, critic_s)
        times = StepTimes(
            step_s=at_s - self._line_s,
            train_s=self._compute.busy_s - self._busy_at_line_s - critic_s,
            publish_s=self._publisher.last_s,
            offer=self._publisher.last_offer,
            waits_s=self.waits.take(),
        )
        self._line_s, self._busy_at_line_s = at_s, self._compute.busy_s
        version = self._context.progress.policy_version
        count_step(report, times, policy_version=version)
        line = step_line(report, times, policy_version=version, now_s=clock.now_s())
        return line | {"step/skipped_attempts": float(open_step.num_skipped)} | self.order_metrics()


def _unusable_groups(decoded: Groups, left_out: Sequence[SkippedSample]) -> dict[str, str]:
    """The groups without a single trainable sample, with the most common reason."""
    reasons: dict[str, Counter[str]] = {group_id: Counter() for group_id in decoded}
    for sample in left_out:
        if sample.group_id in reasons:
            reasons[sample.group_id][sample.reason.value] += 1
    return {
        group_id: reasons[group_id].most_common(1)[0][0] if samples else "empty"
        for group_id, samples in decoded.items()
        if reasons[group_id].total() == len(samples)
    }
