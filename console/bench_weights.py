"""`penstock bench weights`: what it costs to bring weights to generators. Progress goes to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from console.benching import bench
from penstock.config import ConfigError

_TARGETS = {
    "full.ratio_to_bare_download": ">= 0.7",
    "delta.bytes_ratio": "<= 0.05",
    "link.time_ratio": "<= 1.2",
    "link_copies": "1 and headers",
}


def bench_weights_command(*, is_json: bool, is_quick: bool, engine: str | None) -> int:
    """Benchmark travelling weights, swapped in `engine` (transformers where None); returns the exit status.

    Raises ConfigError where there is no such engine.
    """
    from benchmarks.weights import suite, swap

    engine = engine or swap.ENGINES[0]
    if engine not in swap.ENGINES:
        raise ConfigError(f"--engine: {engine!r} is not known; there is: {', '.join(swap.ENGINES)}")
    plan = suite.QUICK if is_quick else suite.FULL
    return bench(lambda progress: suite.run(plan, engine=engine, progress=progress), _print_table, is_json=is_json)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Weights: medians of interleaved repetitions")
    for heading in ("number", "median", "spread", "target"):
        table.add_column(heading, justify="right" if heading in ("median", "spread") else "left")
    for name, value, spread in _rows(result, ""):
        table.add_row(name, _short(value), " to ".join(map(_short, spread)), _TARGETS.get(name, ""))
    Console().print(table)


def _rows(numbers: dict[str, Any], prefix: str) -> Iterator[tuple[str, float, list[float]]]:
    spreads = numbers.get("spread", {})
    for name, value in numbers.items():
        if isinstance(value, dict) and name != "spread":
            yield from _rows(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value, spreads.get(name, [])


def _short(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
