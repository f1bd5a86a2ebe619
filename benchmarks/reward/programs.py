"""Measures how many programs the reward `code` runs a second, in each shape of tests.

penstock bench reward.programs [--sandbox NAME] [--programs N] [--cells N] [--repetitions N] [--json]

Trivial programs with one test each, so what is measured is the sandbox and what is around it. CPU time is that of this
process and all its descendants, from /proc; what an engine of containers does in its own processes is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.broker.processes import cpu_s
from benchmarks.command import Progress, Result, measure, print_table, short
from penstock.rewards import RewardItem
from services.reward.code.code_reward import CodeReward
from services.reward.code.config import CodeConfig
from services.reward.code.sandboxes.finding import KINDS

_NUMBERS = ("programs_per_second", "cpu_ms_per_program")
_FUNCTION = "def f(x):\n    return x + 1\n"
_SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "input": ("print(int(input()) + 1)\n", {"tests": [{"input": "1\n", "output": "2"}]}),
    "calls": (_FUNCTION, {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [2]}}),
    "assertions": (_FUNCTION, {"test_list": ["assert f(1) == 2"]}),
}


async def _measure(reward: CodeReward, shape: str, num_programs: int) -> tuple[float, float]:
    """Programs a second, and CPU milliseconds of each. Raises RuntimeError: one did not pass."""
    program, row = _SHAPES[shape]
    clock = asyncio.get_running_loop().time
    start_s, used_s = clock(), cpu_s(os.getpid())
    results = await reward.score([RewardItem(completion=program, metadata=dict(row))] * num_programs)
    took_s, used_s = clock() - start_s, cpu_s(os.getpid()) - used_s
    failed = [result for result in results if result.value != 1.0]
    if failed:
        raise RuntimeError(f"{len(failed)} of {num_programs} did not pass: {failed[0].status} {failed[0].message}")
    return num_programs / took_s, 1_000 * used_s / num_programs


async def run(sandbox: str, num_programs: int, num_cells: int, num_repetitions: int, progress: Progress) -> Result:
    """Measure; medians and ranges of the repetitions."""
    # Room in time, so that a busy machine makes no program wrong.
    config = CodeConfig.model_validate({"sandbox": sandbox, "num_cells": num_cells, "cpu_s": 60, "wall_s": 120})
    reward = CodeReward(config)
    shapes: dict[str, Any] = {}
    try:
        for shape in _SHAPES:
            progress(f"{shape}: {num_repetitions} times {num_programs} programs")
            # Starts the cells.
            await _measure(reward, shape, num_cells)
            found = [await _measure(reward, shape, num_programs) for _ in range(num_repetitions)]
            for name, values in zip(
                ("programs_per_second", "cpu_ms_per_program"), zip(*found, strict=True), strict=True
            ):
                shapes.setdefault(shape, {})[name] = statistics.median(values)
                shapes[shape][f"{name}_range"] = [min(values), max(values)]
    finally:
        await reward.close()
    return {"sandbox": sandbox, "num_programs": num_programs, "num_cells": num_cells, "shapes": shapes}


def _show(result: Result) -> None:
    rows = [
        (f"{shape}: {name}", short(found[name]), " to ".join(map(short, found[f"{name}_range"])))
        for shape, found in result["shapes"].items()
        for name in _NUMBERS
    ]
    print_table(f"Trivial programs, sandbox {result['sandbox']}", ("number", "median", "spread"), [rows])


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandbox", choices=["auto", *KINDS], default="auto")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--cells", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    return measure(
        lambda progress: run(options.sandbox, options.programs, options.cells, options.repetitions, progress),
        _show,
        is_json=options.json,
    )


if __name__ == "__main__":
    raise SystemExit(main())
