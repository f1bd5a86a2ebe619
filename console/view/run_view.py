"""Keeps the state of a run under way, updated by events and polls and shown by `console.view.live_display`.

Opens no connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from console.advice.measured import Occupancy
from console.config.run_folder import ProcessRecord
from penstock.v1 import broker_pb2, trainer_pb2
from penstock.wire.timestamps import unix_s

_ETA_STEPS = 10
_MIN_RATE_STEPS = 3
BUSY_WINDOW_S = 15.0

REWARD, STALENESS, MAX_STALENESS = "reward/mean", "staleness/mean", "staleness/max"
SAMPLES_PER_SECOND, TOKENS_PER_SECOND = "throughput/samples_per_second", "throughput/response_tokens_per_second"
IDLE_S, STEP_S, TRAIN_S, LENGTH = "time/idle_s", "time/step_s", "time/train_s", "length/mean"
SAMPLES = "step/samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimiser step as reported."""

    version: int
    """The version it produced."""
    time_s: float
    """When it was reported, Unix seconds."""
    metrics: Mapping[str, float]
    """Metrics by name, as in metrics.jsonl."""

    def get(self, name: str) -> float | None:
        """A metric, or None if the trainer did not report it."""
        return self.metrics.get(name)

    @property
    def idle_ratio(self) -> float | None:
        """Fraction of the step's time in which the trainer waited for samples, 0 to 1."""
        idle_s, step_s = self.get(IDLE_S), self.get(STEP_S)
        return None if idle_s is None or not step_s else min(1.0, max(0.0, idle_s / step_s))


@dataclass(slots=True, kw_only=True)
class RunView:
    """The state of a run; one writer, any number of readers on the same event loop."""

    run_id: str
    num_steps: int
    phase: str = "checking"
    """The current phase, for display."""
    step: Step | None = None
    """The newest step."""
    evaluations: list[trainer_pb2.EvaluationReport] = field(default_factory=list)
    processes: dict[str, ProcessRecord] = field(default_factory=dict)
    run: broker_pb2.GetRunResponse | None = None
    """The broker's state; None until it has answered, or while it does not."""
    generator_idle_ratio: float | None = None
    """Fraction of the last seconds in which generators decoded nothing, averaged over generators, 0 to 1."""
    occupancy: Occupancy = field(default_factory=Occupancy)
    """Where samples were and how idle generators were, since the first step."""
    refused_chunks: dict[str, dict[str, int]] = field(default_factory=dict)
    """By generator and reason, as each counted last; after a restart it counts from zero."""
    history: dict[int, Step] = field(default_factory=dict)
    """The steps of the surviving history by version."""
    _recent: deque[Step] = field(default_factory=lambda: deque(maxlen=_ETA_STEPS + 1))

    @property
    def num_restarts(self) -> int:
        """Restarts of all services so far."""
        return sum(record.num_restarts for record in self.processes.values())

    @property
    def num_in_flight_by_state(self) -> Mapping[str, int]:
        """Samples of training groups by state: queued, leased, finished, scoring, scored, delivered."""
        return dict(self.run.audit.in_flight_by_state) if self.run is not None else {}

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the last step, at the pace of the latest ones; None before there is a pace."""
        if self.step is None or len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        num_steps = last.version - first.version
        if num_steps <= 0:
            return None
        return max(0.0, (self.num_steps - last.version) * (last.time_s - first.time_s) / num_steps)

    @property
    def computing_samples_per_second(self) -> float | None:
        """Rate of training while it computes, waits left out: the median of the newest steps; None before a few."""
        rates = [(step.get(SAMPLES) or 0.0) / seconds for step in self._recent if (seconds := step.get(TRAIN_S))]
        return median(rates) if len(rates) >= _MIN_RATE_STEPS else None

    def add_step(self, report: trainer_pb2.StepReport, *, time_s: float) -> Step:
        """Take in a step; after a rewind of the trainer, versions restart lower."""
        step = Step(version=report.policy_version, time_s=time_s, metrics=dict(report.metrics))
        if self.step is not None and step.version <= self.step.version:
            self._recent.clear()
            self.history = {version: kept for version, kept in self.history.items() if version < step.version}
        self.num_steps = report.num_steps or self.num_steps
        self.step = step
        self.history[step.version] = step
        self._recent.append(step)
        return step

    def set_run(self, run: broker_pb2.GetRunResponse | None) -> None:
        """Take in the broker's state."""
        self.run = run
        for each in run.generators if run is not None else ():
            if each.beat.refused_chunks:
                self.refused_chunks[each.hello.generator_id] = dict(each.beat.refused_chunks)
        self.generator_idle_ratio = idle_ratio(run) if run is not None else None
        if run is not None and self.step is not None and not run.is_closed:
            self.occupancy.add(
                run.audit.in_flight_by_state,
                num_generators=len(run.generators),
                idle_ratio=self.generator_idle_ratio,
            )


def idle_ratio(run: broker_pb2.GetRunResponse) -> float | None:
    """The share of the last BUSY_WINDOW_S in which generators decoded nothing, mean over them; None if unknown."""
    begin_s = unix_s(run.now_time) - BUSY_WINDOW_S
    ratios = []
    for generator in run.generators:
        # Spans arrive with heartbeats, so the time after the last one is unknown.
        end_s = unix_s(generator.beat_time)
        if end_s <= begin_s:
            continue
        busy_s = sum(
            max(0.0, min(end_s, unix_s(span.end_time)) - max(begin_s, unix_s(span.start_time)))
            for span in generator.busy_spans
        )
        ratios.append(1.0 - min(1.0, busy_s / (end_s - begin_s)))
    return sum(ratios) / len(ratios) if ratios else None
