"""`penstock bench generator`: updates in flight on a real vLLM engine, and concurrency. Progress goes to stderr."""

from __future__ import annotations

from typing import Any

from console.benching import bench
from penstock.config import ConfigError

_TARGETS = {
    "throughput_ratio": ">= 0.9",
    "cpu_ratio": ">= 0.9",
    "num_lost": "0",
    "max_logprob_difference": "<= 1e-4",
    "ratio_to_best_calm_fixed": ">= 0.95",
    "preempted_share": "<= 0.02",
}


def bench_generator_command(*, is_json: bool, is_quick: bool, only: str | None) -> int:
    """Benchmark the generator's engine, or one part of that; returns the exit status. Raises ConfigError."""
    from benchmarks.generator import suite

    if only is not None and only not in suite.PARTS:
        raise ConfigError(f"bench: --only {only!r} is not known; there is: {', '.join(suite.PARTS)}")
    plan, parts = suite.QUICK if is_quick else suite.FULL, suite.PARTS if only is None else (only,)
    return bench(lambda progress: suite.run(plan, progress=progress, parts=parts), _print_table, is_json=is_json)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Generator: updates in flight by mode, and concurrency by workload")
    for heading in ("subject", "number", "value", "target"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    subjects = {mode: result[mode] for mode in ("keep", "recompute") if mode in result} | result["concurrency"]
    for subject, numbers in subjects.items():
        for name, value in numbers.items():
            if isinstance(value, int | float):
                table.add_row(subject, name, f"{value:,.4g}", _TARGETS.get(name, ""))
        table.add_section()
    Console().print(table)
