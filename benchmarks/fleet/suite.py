"""Runs every arm of the fleet experiment, repetitions interleaved, and reports for `penstock bench fleet`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet import kill, trained
from benchmarks.fleet.generation import Pace, Surroundings, measure_undisturbed
from benchmarks.fleet.machines import machines
from benchmarks.fleet.surroundings import staged
from benchmarks.fleet.workload import TAIL_SHARES, Workload, make_workload, recall

Result = dict[str, Any]

BASELINE = ("random", "none")
ARMS = (
    BASELINE,
    ("fifo", "none"),
    ("lpt", "ranker"),
    ("lpt", "oracle"),
    ("streamrl", "ranker"),
    ("streamrl", "oracle"),
    ("auto", "ranker"),
    ("auto", "oracle"),
)
"""Dispatch policy and source of forecasts; everything is relative to the first."""
SCALING_ARMS = (BASELINE, ("lpt", "ranker"), ("streamrl", "oracle"))
SCALING_CELL = ("unlike", "kv_limited")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    num_repetitions: int
    num_samples: int
    length_scale: float
    cells: Sequence[tuple[str, str]]
    """Fleet and regime."""
    arms: Sequence[tuple[str, str]]
    """Arms out of ARMS; the others are compared with the first."""
    time_scale: float
    other_time_scale: float | None
    """Time scale at which SCALING_ARMS are measured too."""
    trained_cells: Sequence[tuple[str, str]]
    """Where to try a real scheduler's forecasts."""
    kill_samples: int
    kill_tokens: int
    kill_after_s: float


FULL = Plan(
    num_repetitions=3,
    num_samples=1024,
    length_scale=1.0,
    cells=(("alike", "kv_limited"), ("alike", "roomy"), ("unlike", "kv_limited"), ("unlike", "roomy")),
    arms=ARMS,
    time_scale=10.0,
    other_time_scale=5.0,
    trained_cells=(("alike", "kv_limited"), ("unlike", "kv_limited")),
    kill_samples=96,
    kill_tokens=2_000,
    kill_after_s=9.0,
)
QUICK = Plan(
    num_repetitions=1,
    num_samples=64,
    length_scale=0.1,
    cells=(("unlike", "kv_limited"),),
    arms=(BASELINE, ("streamrl", "oracle")),
    time_scale=20.0,
    other_time_scale=None,
    trained_cells=(),
    kill_samples=0,
    kill_tokens=0,
    kill_after_s=0.0,
)


async def run(plan: Plan, *, redis_server: Path, progress: Callable[[str], None]) -> Result:
    """Measure everything; `progress` receives status messages."""
    async with staged(redis_server) as around:
        result = await _dispatch(around, plan, progress)
        result |= await _trained(around, plan, progress)
        if plan.kill_samples:
            result["kill"] = await kill.compare(
                around,
                num_samples=plan.kill_samples,
                num_tokens=plan.kill_tokens,
                kill_after_s=plan.kill_after_s,
                num_repetitions=plan.num_repetitions,
                progress=progress,
            )
    return result


async def _dispatch(around: Surroundings, plan: Plan, progress: Callable[[str], None]) -> Result:
    found: dict[str, dict[str, list[float]]] = {}
    workloads = [
        make_workload(num_samples=plan.num_samples, scale=plan.length_scale, seed=seed)
        for seed in range(plan.num_repetitions)
    ]
    for repetition, workload in enumerate(workloads):
        for table, fleet, regime, (dispatch, forecast), time_scale in _measurements(plan, repetition):
            arm = _arm(dispatch, forecast)
            progress(f"{table}, {arm}: repetition {repetition + 1} of {plan.num_repetitions}")
            step = await measure_undisturbed(
                around,
                progress=progress,
                name=f"{table}-{arm}-{repetition}",
                machines=machines(fleet, regime),
                workload=workload,
                dispatch=dispatch,
                forecast=forecast,
                pace=Pace.scaled(time_scale),
                seed=repetition,
            )
            found.setdefault(table, {}).setdefault(arm, []).append(step.generation_s)
    result: Result = {table: _summary(times) for table, times in found.items()}
    result["ranker"] = _recalls(workloads)
    return result


async def _trained(around: Surroundings, plan: Plan, progress: Callable[[str], None]) -> Result:
    found = await trained.compare(
        around,
        num_samples=plan.num_samples,
        cells=plan.trained_cells,
        num_repetitions=plan.num_repetitions,
        time_scale=plan.time_scale,
        progress=progress,
    )
    recalls = found.pop("recall", {})
    result: Result = {table: _summary(times) for table, times in found.items()}
    return result | ({"trained_ranker": trained.recalls(recalls)} if recalls else {})


def _measurements(plan: Plan, repetition: int) -> Iterator[tuple[str, str, str, tuple[str, str], float]]:
    """Table, fleet, regime, arm and time scale; each repetition starts with another arm."""
    for fleet, regime in plan.cells:
        for arm in _rotated(plan.arms, repetition):
            yield f"{fleet}_{regime}", fleet, regime, arm, plan.time_scale
    if plan.other_time_scale is not None:
        fleet, regime = SCALING_CELL
        table = f"{fleet}_{regime}_at_{plan.other_time_scale:g}x"
        for arm in _rotated(SCALING_ARMS, repetition):
            yield table, fleet, regime, arm, plan.other_time_scale


def _rotated(arms: Sequence[tuple[str, str]], by: int) -> Sequence[tuple[str, str]]:
    by %= len(arms)
    return [*arms[by:], *arms[:by]]


def _arm(dispatch: str, forecast: str) -> str:
    return dispatch if forecast == "none" else f"{dispatch}_{forecast}"


def _summary(times: dict[str, list[float]]) -> Result:
    """Medians over the repetitions of the ratio to the same repetition's baseline, with minimum and maximum."""
    baseline = times[_arm(*BASELINE)]
    ratios = {
        arm: [time_s / base_s for time_s, base_s in zip(values, baseline, strict=True)] for arm, values in times.items()
    }
    return {
        **{arm: statistics.median(values) for arm, values in ratios.items()},
        "spread": {arm: [min(values), max(values)] for arm, values in ratios.items()},
        "generation_s": {arm: statistics.median(values) for arm, values in times.items()},
    }


def _recalls(workloads: Sequence[Workload]) -> Result:
    return {
        f"recall_of_longest_{share:.0%}": statistics.fmean(
            recall(workload.lengths, workload.forecasts["ranker"], share) for workload in workloads
        )
        for share in TAIL_SHARES
    }
