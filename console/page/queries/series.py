"""Answers what curves are drawn of: metrics over steps, tokens or hours, thinned to the width of a screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from console.page.files.metrics_table import Column, MetricsTable

EVALUATIONS = "eval/"
X_AXES = ("step", "tokens", "hours")
MAX_POINTS, MAX_SERIES = 5000, 64
MAX_VALUES = 100_000
"""Points of all curves of an answer; more curves are drawn from fewer points each."""
Edges = npt.NDArray[np.int64]
Answer = dict[str, Any]


def series(
    steps: MetricsTable,
    evaluations: MetricsTable,
    names: Sequence[str],
    *,
    x: str = "step",
    points: int = 600,
    within: tuple[float, float] = (-math.inf, math.inf),
) -> Answer:
    """Means, minima and maxima of metrics by bucket of neighbouring steps; null where nothing was measured.

    Args:
        steps: metrics.jsonl.
        evaluations: evaluations.jsonl, whose names begin with EVALUATIONS.
        names: Metrics; unknown ones are all null.
        x: One of X_AXES. Hours count from the first step that was recorded.
        points: Buckets at most.
        within: The part of the x axis that is asked for.
    """
    versions = steps.versions
    tables = {name: evaluations if name.startswith(EVALUATIONS) else steps for name in names}
    if evaluations in tables.values():
        versions = np.union1d(versions, evaluations.versions)
    columns = {name: _laid_out(table.column(name), table.versions, versions) for name, table in tables.items()}
    axis = _axis(x, versions, steps, evaluations)
    is_inside = (axis >= within[0]) & (axis <= within[1])
    axis, columns = axis[is_inside], {name: column[is_inside] for name, column in columns.items()}
    edges = _edges(len(axis), points)
    found = {name: _buckets(column, edges) for name, column in columns.items()}
    return {
        "x": _plain(_means(axis, edges), digits=10),
        "series": {name: _plain(means) for name, (means, _, _) in found.items()},
        "min": {name: _plain(low) for name, (_, low, _) in found.items()},
        "max": {name: _plain(high) for name, (_, _, high) in found.items()},
        "steps": len(steps.versions),
    }


def _axis(x: str, versions: Column, steps: MetricsTable, evaluations: MetricsTable) -> Column:
    if x == "step" or not len(versions):
        return versions
    if x == "tokens":
        # Before the first step nothing was trained.
        known = np.concatenate([[0.0], steps.versions]), np.concatenate([[0.0], steps.tokens])
        return np.asarray(np.interp(versions, *known), dtype=np.float64)
    times = _laid_out(steps.times, steps.versions, versions)
    others = _laid_out(evaluations.times, evaluations.versions, versions)
    times = np.where(np.isnan(times), others, times)
    is_known = ~np.isnan(times)
    if not is_known.any():
        return np.full(len(versions), np.nan)
    times = np.interp(versions, versions[is_known], times[is_known])
    return np.asarray((times - times[0]) / 3600.0, dtype=np.float64)


def _laid_out(values: Column, versions: Column, onto: Column) -> Column:
    """Values [n] at their places among other versions [m], which hold all of theirs; else NaN."""
    laid = np.full(len(onto), np.nan)
    laid[np.searchsorted(onto, versions)] = values
    return laid


def _edges(num: int, points: int) -> Edges:
    return np.unique(np.linspace(0, num, min(num, points) + 1).astype(np.int64)[:-1]) if num else np.zeros(0, np.int64)


def _buckets(values: Column, edges: Edges) -> tuple[Column, Column, Column]:
    """Mean, minimum and maximum of each bucket, which begin at `edges`; NaN where one is empty."""
    if not len(edges):
        return values[:0], values[:0], values[:0]
    with np.errstate(invalid="ignore"):
        low, high = np.fmin.reduceat(values, edges), np.fmax.reduceat(values, edges)
    return _means(values, edges), low, high


def _means(values: Column, edges: Edges) -> Column:
    if not len(edges):
        return values[:0]
    is_known = ~np.isnan(values)
    counts = np.add.reduceat(is_known.astype(np.float64), edges)
    sums = np.add.reduceat(np.where(is_known, values, 0.0), edges)
    means: Column = np.divide(sums, counts, out=np.full(len(edges), np.nan), where=counts > 0)
    return means


def _plain(values: Column, digits: int = 6) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.{digits}g}") for value in values.tolist()]
