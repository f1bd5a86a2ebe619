"""Compare credit by turns, with and without a critic, with credit by samples on five turns: `penstock bench turns`.

penstock bench turns [--json] [--quick]

Two tasks, which pay a turn at once or two turns later. Three seeds, 60 steps of 64 samples each, in groups of 8 or
alone, one thread; sessions over gRPC, which the environment loses every 12 turns. What counts is the first step at
which the mean of five steps reaches 80 % of right turns, and the mean share over all steps.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.command import Progress, Result, measure, print_table, short, suite_parser
from benchmarks.scratch import scratch_folder
from benchmarks.turns.task import NextLetter, PaidLate, make_model

TASKS: dict[str, type[NextLetter]] = {"paid at once": NextLetter, "paid two turns later": PaidLate}
CASES: dict[str, dict[str, Any]] = {
    "samples": {},
    "turns, discount 1": {"turn_discount": 1.0},
    "turns, discount 0": {"turn_discount": 0.0},
    "samples, critic": {"name": "ppo"},
    "turns, critic, lambda 1": {"name": "ppo", "turn_discount": 1.0},
    "turns, critic, lambda 0.5": {"name": "ppo", "turn_discount": 1.0, "gae_lambda": 0.5},
    "turns, critic, lambda 0": {"name": "ppo", "turn_discount": 1.0, "gae_lambda": 0.0},
    "samples, critic, no siblings": {"name": "ppo", "group_size": 1},
    "turns, critic, lambda 0.5, no siblings": {
        "name": "ppo",
        "turn_discount": 1.0,
        "gae_lambda": 0.5,
        "group_size": 1,
    },
}
SEEDS, NUM_STEPS = (0, 1, 2), 60
REACHED, WINDOW_STEPS = 0.8, 5


def steps_to(shares: Sequence[float]) -> int | None:
    """The first step at which the mean of the last five reaches 80 %; None if none does."""
    for step in range(WINDOW_STEPS, len(shares) + 1):
        if statistics.mean(shares[step - WINDOW_STEPS : step]) >= REACHED:
            return step
    return None


async def run(folder: Path, seeds: Sequence[int], num_steps: int, progress: Progress) -> Result:
    """Train every case with every seed."""
    # Imported here: it needs torch, which the options do not.
    from benchmarks.turns.training import train

    found: dict[str, dict[str, list[list[float]]]] = {task: {case: [] for case in CASES} for task in TASKS}
    for seed in seeds:
        model = folder / f"model-{seed}"
        make_model(model, seed=seed)
        for (task, environment), (case, settings) in product(TASKS.items(), CASES.items()):
            shares, num_deaths = await train(model, environment, seed=seed, num_steps=num_steps, **settings)
            found[task][case].append(shares)
            reached = f"{_shown(steps_to(shares))} steps to {REACHED:.0%}"
            progress(f"{task}, seed {seed}, credit by {case}: {reached}, {num_deaths} deaths of the environment")
    return {task: {case: _measured(curves) for case, curves in cases.items()} for task, cases in found.items()}


def _measured(curves: Sequence[Sequence[float]]) -> Result:
    return {
        "steps": [steps_to(shares) for shares in curves],
        "means": [statistics.mean(shares) for shares in curves],
        "curves": curves,
    }


def _shown(steps: int | None) -> str:
    return "-" if steps is None else str(steps)


def show(result: Result) -> None:
    """Print a table for each task, a row for each case."""
    for task, cases in result.items():
        rows = [
            (name, ", ".join(map(_shown, case["steps"])), ", ".join(map(short, case["means"])))
            for name, case in cases.items()
        ]
        print_table(f"Turns {task}", ("credit by", "steps to 80 % (by seed)", "mean share of right turns"), [rows])


def main() -> int:
    """Entry point."""
    arguments = suite_parser(__doc__).parse_args()
    seeds, num_steps = ((0,), 3) if arguments.quick else (SEEDS, NUM_STEPS)
    with scratch_folder() as folder:
        return measure(lambda progress: run(folder, seeds, num_steps, progress), show, is_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
