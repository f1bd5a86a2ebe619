"""`penstock bench`: run a benchmark, show a table or print JSON. Progress goes to stderr."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from console.embedded_redis import redis_executable
from penstock.telemetry import configure_logging

_TARGETS = {
    ("short", "ratio_to_bare_stream"): ">= 0.5",
    ("short", "cpu_s_per_1k"): "<= 0.13",
    ("long", "ratio_to_bare_stream"): ">= 0.65",
    ("latency", "p50_ms"): "<= 1.0",
    ("latency", "p99_ms"): "<= 10",
    ("token_stream", "broker_core_percent_per_10k_tokens_per_second"): "< 15",
    ("queue", "slowdown"): "<= 1.5",
}


def bench_command(*, is_json: bool, is_quick: bool) -> int:
    """Benchmark the broker; returns the exit status."""
    from benchmarks.broker import suite

    configure_logging("bench", level="warning")
    plan = suite.QUICK if is_quick else suite.FULL
    result = asyncio.run(
        suite.run(plan, redis_server=redis_executable(), progress=lambda text: print(text, file=sys.stderr))
    )
    if is_json:
        print(json.dumps(result, indent=2))
    else:
        _print_table(result)
    return 0


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Broker: medians of interleaved repetitions")
    for heading in ("workload", "number", "median", "spread", "target"):
        table.add_column(heading, justify="right" if heading in ("median", "spread") else "left")
    for workload, numbers in result.items():
        spreads: dict[str, list[float]] = numbers.get("spread", {})
        for name, value in numbers.items():
            if isinstance(value, int | float) and name != "num_repetitions":
                spread = " to ".join(map(_short, spreads[name])) if name in spreads else ""
                table.add_row(workload, name, _short(value), spread, _TARGETS.get((workload, name), ""))
        table.add_section()
    Console().print(table)


def _short(value: float) -> str:
    return str(value) if isinstance(value, bool) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
