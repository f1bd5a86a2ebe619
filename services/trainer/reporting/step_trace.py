"""The span of each optimiser step: its waits and its computing below it, and links to the samples it was taken on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock import tracing
from penstock.clock import Clock
from penstock.v1 import types_pb2
from services.trainer.reporting.stall_timer import Cause

MAX_PARTS: Final = 512
"""Spans below a step; further ones are left out."""
MAX_GROUPS: Final = 4096
"""Sampled groups that are remembered until they are trained on; the newest."""
_NEAR_S = 0.01
"""Parts of one kind that are closer are one."""


class StepTrace:
    """Collects the parts of the step under way; times are those of the clock's monotonic seconds."""

    def __init__(self, run_id: str, clock: Clock) -> None:
        self._run_id = run_id
        self._clock = clock
        self._begun_s = clock.monotonic_s()
        self._parts: list[tuple[str, float, float]] = []
        """What for, from, to; what for is empty for computing."""
        self._samples: dict[str, list[tracing.TraceContext]] = {}
        """Spans of sampled samples, by group; some groups arrive a step early, some are never trained on."""

    def note_wait(self, cause: Cause, start_s: float, end_s: float) -> None:
        """The loop waited."""
        self._note(cause.value, start_s, end_s)

    def note_computing(self, start_s: float, end_s: float) -> None:
        """The compute thread worked."""
        self._note("", start_s, end_s)

    def note_groups(self, groups: Iterable[types_pb2.TrajectoryGroup]) -> None:
        """Groups arrived, on which the step may be taken."""
        for group in groups:
            root = tracing.read_traceparent(group.prompt.traceparent) if group.prompt.traceparent else None
            if root is not None and tracing.is_on():
                if len(self._samples) >= MAX_GROUPS:
                    del self._samples[next(iter(self._samples))]
                keys = [trajectory.key for trajectory in group.trajectories]
                self._samples[group.prompt.group_id] = [
                    tracing.sample_context(root, key.sample_index, key.attempt) for key in keys
                ]

    def finish(self, group_ids: Iterable[str], *, policy_version: int, history: int) -> None:
        """The step was taken on these groups, and made that version; the next one begins."""
        ended_s, begun_s = self._clock.monotonic_s(), self._begun_s
        parts, links = self._parts, [each for name in group_ids for each in self._samples.pop(name, ())]
        self._begun_s, self._parts = ended_s, []
        if not tracing.is_on():
            return
        context = tracing.step_context(self._run_id, policy_version, history)
        unix_s = self._clock.now_s() - ended_s
        tracing.record(
            tracing.Span(
                name="rl.train.step",
                run_id=self._run_id,
                start_s=unix_s + begun_s,
                end_s=unix_s + ended_s,
                context=context,
                attributes={"rl.policy.version": policy_version, "rl.history": history},
                links=links,
            )
        )
        for waits_for, start_s, end_s in parts:
            tracing.record(
                tracing.Span(
                    name="rl.train.wait" if waits_for else "rl.train.compute",
                    run_id=self._run_id,
                    start_s=unix_s + max(begun_s, start_s),
                    end_s=unix_s + end_s,
                    parent=context,
                    attributes={"rl.waits_for": waits_for} if waits_for else {},
                )
            )

    def _note(self, waits_for: str, start_s: float, end_s: float) -> None:
        if not tracing.is_on():
            return
        if self._parts and self._parts[-1][0] == waits_for and start_s - self._parts[-1][2] < _NEAR_S:
            self._parts[-1] = (waits_for, self._parts[-1][1], end_s)
        elif len(self._parts) < MAX_PARTS:
            self._parts.append((waits_for, start_s, end_s))
