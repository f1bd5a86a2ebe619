"""Forecasts of completion lengths from those seen so far: a group's own mean, else the run's mean.

Uncertainty is the standard deviation of the same observations. Nothing is forecast before anything was seen. Memory is
bounded: the least recently seen groups and runs are forgotten first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from penstock.errors import UnknownRunError
from penstock.v1 import scheduler_pb2 as pb

MAX_GROUPS_PER_RUN = 100_000
MAX_RUNS = 1_000


@dataclass(slots=True)
class _Moments:
    """Running count, mean and sum of squared deviations (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)

    def forecast(self) -> pb.LengthForecast:
        forecast = pb.LengthForecast(expected_tokens=self.mean)
        if self.count > 1:
            forecast.deviation_tokens = math.sqrt(self.squares / (self.count - 1))
        return forecast


class _RunLengths:
    def __init__(self) -> None:
        self.overall = _Moments()
        self.groups: OrderedDict[str, _Moments] = OrderedDict()

    def add(self, group_id: str, num_tokens: int) -> None:
        self.overall.add(num_tokens)
        self.groups.setdefault(group_id, _Moments()).add(num_tokens)
        self.groups.move_to_end(group_id)
        if len(self.groups) > MAX_GROUPS_PER_RUN:
            self.groups.popitem(last=False)

    def forecast(self, group_id: str) -> pb.LengthForecast:
        moments = self.groups.get(group_id, self.overall)
        return moments.forecast() if moments.count else pb.LengthForecast()


class LengthForecaster:
    """Mean lengths by run and group."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _RunLengths] = OrderedDict()

    def observe(self, run_id: str, observations: list[pb.LengthObservation]) -> None:
        """Learn from completions that were seen."""
        run = self._runs.setdefault(run_id, _RunLengths())
        self._runs.move_to_end(run_id)
        if len(self._runs) > MAX_RUNS:
            self._runs.popitem(last=False)
        for observation in observations:
            run.add(observation.query.group_id, observation.num_completion_tokens)

    def forecast(self, run_id: str, queries: list[pb.LengthQuery]) -> list[pb.LengthForecast]:
        """One forecast per query, in order; without an expectation where nothing is known."""
        run = self._runs.get(run_id)
        return [run.forecast(query.group_id) if run else pb.LengthForecast() for query in queries]

    def describe(self, run_id: str) -> pb.GetLengthModelResponse:
        """What is known of a run. Raises UnknownRunError."""
        run = self._runs.get(run_id)
        if run is None:
            raise UnknownRunError(f"run_id: no length of {run_id!r} was reported", run_id=run_id)
        return pb.GetLengthModelResponse(num_observations=run.overall.count)
