"""`penstock bench e2e`: Penstock next to TRL and to the ideal overlap. Progress goes to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from console.benching import RUNS_DIR, bench

_TARGETS = {
    "ratio_to_trl": ">= 2 (floor 1.3)",
    "time_ratio_to_trl": "<= 0.5",
    "ratio_to_ideal": ">= 0.85 (floor 0.55)",
}


def bench_e2e_command(*, is_json: bool, is_quick: bool, trl_python: Path | None = None) -> int:
    """Measure, and print a table or JSON; returns the exit status. Raises ConfigError when the task cannot be made."""
    from benchmarks.e2e import suite
    from benchmarks.e2e.trl_environment import trl_python as find_trl_python
    from console.run.quick import prepare_task

    base = RUNS_DIR.absolute()
    task = prepare_task(base / "quickstart", seed=0, is_stdout_free=False)
    plan = suite.QUICK if is_quick else suite.FULL

    async def run(progress: suite.Progress) -> suite.Result:
        python = await find_trl_python(trl_python, cache_dir=base, progress=progress)
        return await suite.run(
            plan, model_dir=task.model_dir, train_path=task.train_path, trl_python=python, progress=progress
        )

    return bench(run, _print_table, is_json=is_json)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="End to end: medians of interleaved repetitions")
    for heading in ("side", "number", "median", "spread", "target"):
        table.add_column(heading, justify="right" if heading in ("median", "spread") else "left")
    sides = {"penstock": result["penstock"], "trl": result["trl"], "": result}
    for side, numbers in sides.items():
        for name, value in numbers.items():
            if value is None or isinstance(value, int | float):
                spread = " to ".join(f"{each:,.4g}" for each in numbers["spread"].get(name, ()))
                shown = "not reached" if value is None else f"{value:,.4g}"
                table.add_row(side, name, shown, spread, _TARGETS.get(name, ""))
        table.add_section()
    Console().print(table)
