"""Draws completion lengths from a problem's distribution, and forecasts with a ranker's errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.scheduler.problem.output_lengths import (
    EmpiricalLengths,
    HistogramLengths,
    LognormalLengths,
    OutputLengths,
)
from services.scheduler.problem.workload import Workload

_Array = npt.NDArray[np.float64]
_AT_ONCE = 8192
RANKER_ERROR = 0.25
"""Standard deviation of the logarithm of forecast over length; gives about StreamRL's recall of the longest."""


def draw(lengths: OutputLengths, count: int, seed: int) -> _Array:
    """This many lengths in tokens, each at least 1."""
    random = np.random.default_rng(seed)
    if isinstance(lengths, LognormalLengths):
        drawn = np.minimum(random.lognormal(math.log(lengths.median), lengths.sigma, count), lengths.max)
    elif isinstance(lengths, HistogramLengths):
        shares = np.asarray(lengths.fractions) / sum(lengths.fractions)
        bins = random.choice(len(shares), count, p=shares)
        drawn = lengths.start + (bins + random.random(count)) * lengths.width
    elif isinstance(lengths, EmpiricalLengths):
        drawn = random.choice(np.asarray(lengths.values), count)
    else:
        drawn = np.full(count, lengths.length)
    floored: _Array = np.maximum(1.0, drawn)
    return floored


def group_source(workload: Workload, *, seed: int, growth_per_step: float = 0.0) -> Callable[[int], Sequence[float]]:
    """Makes successive groups; their lengths grow by this share of the first ones' with each policy version."""
    size = workload.group_size
    batches = iter(range(seed * 1_000_003, (seed + 1) * 1_000_003))
    pending: list[list[float]] = []

    def group(version: int) -> Sequence[float]:
        if not pending:
            rows = max(1, _AT_ONCE // size)
            drawn = draw(workload.output_len, rows * size, next(batches)).reshape(rows, size)
            pending.extend(drawn.tolist())
        lengths = pending.pop()
        scale = 1 + growth_per_step * version
        return lengths if scale == 1 else [length * scale for length in lengths]

    return group


def forecaster(seed: int) -> Callable[[Sequence[float]], float]:
    """Forecasts a group's mean length with a ranker's error."""
    random = np.random.default_rng(seed)

    def forecast(lengths: Sequence[float]) -> float:
        return float(sum(lengths) / len(lengths) * math.exp(RANKER_ERROR * random.standard_normal()))

    return forecast
