"""Runs both sides and the ideal alternately, and reports for `penstock bench e2e`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.e2e import ideal, penstock_side, trl_side
from benchmarks.e2e.curve import Curve
from benchmarks.e2e.ideal import Alone
from benchmarks.e2e.task import TARGET_REWARD, Task
from benchmarks.scratch import scratch_folder

Result = dict[str, Any]
Progress = Callable[[str], None]
TRL_THREADS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    num_repetitions: int
    num_steps: int
    """Most steps of a training run; with `until_reward` most need fewer."""
    until_reward: float | None
    num_thread_steps: int
    """Steps with each of TRL_THREADS, to choose the best number."""


FULL = Plan(num_repetitions=3, num_steps=60, until_reward=TARGET_REWARD, num_thread_steps=4)
QUICK = Plan(num_repetitions=1, num_steps=3, until_reward=None, num_thread_steps=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All measurements, by repetition."""

    penstock: Sequence[Curve]
    trl: Sequence[Curve]
    alone: Sequence[Alone]
    trl_threads: dict[int, float]
    """Samples per second by number of threads; empty if there was no choice."""
    best_threads: int


async def run(plan: Plan, *, model_dir: Path, train_path: Path, trl_python: Path, progress: Progress) -> Result:
    """Measure everything; `progress` receives status messages. Raises RuntimeError if a side fails."""
    task = Task(
        model_dir=model_dir, train_path=train_path, num_steps=plan.num_steps, until_reward=plan.until_reward, seed=0
    )
    with scratch_folder() as folder:
        threads = await _trl_threads(plan, task, folder, python=trl_python, progress=progress)
        best = max(threads, key=threads.__getitem__) if threads else TRL_THREADS[-1]
        curves: tuple[list[Curve], list[Curve]] = ([], [])
        alone: list[Alone] = []
        for repetition in range(plan.num_repetitions):
            seeded = replace(task, seed=repetition)
            where = f"repetition {repetition + 1} of {plan.num_repetitions}"
            recording = folder / f"samples-{repetition}.jsonl"
            progress(f"Penstock: {where}")
            curves[0].append(
                await penstock_side.train(seeded, _made(folder / f"penstock-{repetition}"), recording=recording)
            )
            progress(f"TRL, {best} threads: {where}")
            curves[1].append(
                await trl_side.train(seeded, _made(folder / f"trl-{repetition}"), python=trl_python, num_threads=best)
            )
            progress(f"either side alone on one core: {where}")
            alone.append(await ideal.measure(model_dir, recording, folder))
    measured = Measured(penstock=curves[0], trl=curves[1], alone=alone, trl_threads=threads, best_threads=best)
    return report(measured)


async def _trl_threads(plan: Plan, task: Task, folder: Path, *, python: Path, progress: Progress) -> dict[int, float]:
    if not plan.num_thread_steps:
        return {}
    short = replace(task, num_steps=plan.num_thread_steps, until_reward=None)
    found: dict[int, float] = {}
    for num_threads in TRL_THREADS:
        progress(f"TRL's best thread count: {num_threads}")
        place = _made(folder / f"trl-threads-{num_threads}")
        curve = await trl_side.train(short, place, python=python, num_threads=num_threads)
        found[num_threads] = curve.samples_per_second
    return found


def report(measured: Measured) -> Result:
    """Medians, their spreads, and ratios of medians."""
    penstock, trl = _side(measured.penstock), _side(measured.trl)
    rates = [each.ideal for each in measured.alone]
    ideal_rate = statistics.median(rates)
    faster = _ratio(trl["seconds_to_reward_0_6"], penstock["seconds_to_reward_0_6"])
    return {
        "penstock": penstock,
        "trl": trl
        | {
            "num_threads": measured.best_threads,
            "samples_per_second_by_threads": {str(key): value for key, value in measured.trl_threads.items()},
        },
        "ratio_to_trl": penstock["samples_per_second"] / trl["samples_per_second"],
        "time_ratio_to_trl": None if faster is None else 1 / faster,
        "ideal_samples_per_second": ideal_rate,
        "ratio_to_ideal": penstock["samples_per_second"] / ideal_rate,
        "generation_alone_samples_per_second": statistics.median(each.generation for each in measured.alone),
        "training_alone_samples_per_second": statistics.median(each.training for each in measured.alone),
        "num_repetitions": len(measured.penstock),
        "spread": {"ideal_samples_per_second": [min(rates), max(rates)]},
    }


def _side(curves: Sequence[Curve]) -> Result:
    rates = [curve.samples_per_second for curve in curves]
    seconds = [curve.seconds_to_reward() for curve in curves]
    reached = [each for each in seconds if each is not None]
    steps = [each for each in (curve.steps_to_reward() for curve in curves) if each is not None]
    is_known = len(reached) == len(seconds)
    return {
        "samples_per_second": statistics.median(rates),
        "tokens_per_second": statistics.median(curve.tokens_per_second for curve in curves),
        # A repetition that never reached the reward has no time; a median without it would flatter.
        "seconds_to_reward_0_6": statistics.median(reached) if is_known else None,
        "steps_to_reward_0_6": statistics.median(steps) if is_known else None,
        "reward_last": statistics.median(curve.steps[-1].reward for curve in curves),
        "spread": {
            "samples_per_second": [min(rates), max(rates)],
            **({"seconds_to_reward_0_6": [min(reached), max(reached)]} if is_known else {}),
        },
    }


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator
