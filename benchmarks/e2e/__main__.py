"""Train the quick start's model with Penstock and TRL alternately, next to the ideal overlap; about 15 minutes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.command import RUNS_DIR, measure, print_table, suite_parser
from benchmarks.e2e import suite
from benchmarks.e2e.trl_environment import trl_python
from console.run.quick import prepare_task

TARGETS = {
    "ratio_to_trl": ">= 2 (floor 1.3)",
    "time_ratio_to_trl": "<= 0.5",
    "ratio_to_ideal": ">= 0.85 (floor 0.55)",
}


def main() -> int:
    """Measure and print; returns the exit status. Raises ConfigError if the task cannot be made."""
    parser = suite_parser(__doc__)
    parser.add_argument(
        "--trl-python", type=Path, metavar="PATH", help="a Python with TRL; by default one is created in runs/"
    )
    options = parser.parse_args()
    base = RUNS_DIR.absolute()
    task = prepare_task(base / "quickstart", seed=0, is_stdout_free=False)
    plan = suite.QUICK if options.quick else suite.FULL

    async def run(progress: suite.Progress) -> suite.Result:
        python = await trl_python(options.trl_python, cache_dir=base, progress=progress)
        return await suite.run(
            plan, model_dir=task.model_dir, train_path=task.train_path, trl_python=python, progress=progress
        )

    return measure(run, _show, is_json=options.json)


def _show(result: dict[str, Any]) -> None:
    sides = {"penstock": result["penstock"], "trl": result["trl"], "": result}
    print_table(
        "End to end: medians of interleaved repetitions",
        ("side", "number", "median", "spread", "target"),
        (_rows(side, numbers) for side, numbers in sides.items()),
    )


def _rows(side: str, numbers: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in numbers.items():
        if value is None or isinstance(value, int | float):
            spread = " to ".join(f"{each:,.4g}" for each in numbers["spread"].get(name, ()))
            yield side, name, "not reached" if value is None else f"{value:,.4g}", spread, TARGETS.get(name, "")


if __name__ == "__main__":
    sys.exit(main())
