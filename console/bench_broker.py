"""`penstock bench`: run a benchmark, show a table or print JSON. Progress goes to stderr."""

from __future__ import annotations

from typing import Any

from console.benching import RUNS_DIR, bench
from console.launch.embedded_redis import redis_executable

_TARGETS = {
    ("short", "ratio_to_bare_stream"): ">= 0.5",
    ("short", "cpu_s_per_1k"): "<= 0.13",
    ("long", "ratio_to_bare_stream"): ">= 0.65",
    ("latency", "p50_ms"): "<= 1.0",
    ("latency", "p99_ms"): "<= 10",
    ("token_stream", "broker_core_percent_per_10k_tokens_per_second"): "< 15",
    ("queue", "slowdown"): "<= 1.5",
}


def bench_broker_command(*, is_json: bool, is_quick: bool, with_peers: bool = False) -> int:
    """Benchmark the broker, `with_peers` beside others; returns the exit status."""
    from benchmarks.broker import suite

    plan = suite.QUICK if is_quick else suite.FULL
    peers_dir = RUNS_DIR.absolute() if with_peers else None
    return bench(
        lambda progress: suite.run(plan, redis_server=redis_executable(), progress=progress, peers_dir=peers_dir),
        _print_table,
        is_json=is_json,
    )


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Broker: medians of interleaved repetitions")
    for heading in ("workload", "number", "median", "spread", "target"):
        table.add_column(heading, justify="right" if heading in ("median", "spread") else "left")
    beside = {
        f"{workload}: {name}": numbers
        for workload in ("short", "long")
        for name, numbers in result[workload].items()
        if name != "spread" and isinstance(numbers, dict)
    }
    for workload, numbers in (result | beside).items():
        spreads: dict[str, list[float]] = numbers.get("spread", {})
        for name, value in numbers.items():
            if isinstance(value, int | float) and name != "num_repetitions":
                spread = " to ".join(map(_short, spreads[name])) if name in spreads else ""
                table.add_row(workload, name, _short(value), spread, _TARGETS.get((workload, name), ""))
        table.add_section()
    Console().print(table)


def _short(value: float) -> str:
    return str(value) if isinstance(value, bool) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
