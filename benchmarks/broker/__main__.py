"""Measure a broker, with a real Redis and clients in their own processes, next to a bare gRPC stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.broker import suite
from benchmarks.command import RUNS_DIR, measure, print_table, short, suite_parser
from console.launch.embedded_redis import redis_executable

TARGETS = {
    ("short", "ratio_to_bare_stream"): ">= 0.5",
    ("short", "cpu_s_per_1k"): "<= 0.13",
    ("long", "ratio_to_bare_stream"): ">= 0.65",
    ("latency", "p50_ms"): "<= 1.0",
    ("latency", "p99_ms"): "<= 10",
    ("token_stream", "broker_core_percent_per_10k_tokens_per_second"): "< 15",
    ("queue", "slowdown"): "<= 1.5",
}


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = suite_parser(__doc__)
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also measure Redis alone, PipelineRL's pattern, Reverb and TransferQueue; makes environments in runs/",
    )
    options = parser.parse_args()
    plan = suite.QUICK if options.quick else suite.FULL
    peers_dir = RUNS_DIR.absolute() if options.peers else None
    return measure(
        lambda progress: suite.run(plan, redis_server=redis_executable(), progress=progress, peers_dir=peers_dir),
        _show,
        is_json=options.json,
    )


def _show(result: dict[str, Any]) -> None:
    beside = {
        f"{workload}: {name}": numbers
        for workload in ("short", "long")
        for name, numbers in result[workload].items()
        if name != "spread" and isinstance(numbers, dict)
    }
    print_table(
        "Broker: medians of interleaved repetitions",
        ("workload", "number", "median", "spread", "target"),
        (_rows(workload, numbers) for workload, numbers in (result | beside).items()),
    )


def _rows(workload: str, numbers: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    spreads: dict[str, list[float]] = numbers.get("spread", {})
    for name, value in numbers.items():
        if isinstance(value, int | float) and name != "num_repetitions":
            spread = " to ".join(map(short, spreads.get(name, ())))
            yield workload, name, short(value), spread, TARGETS.get((workload, name), "")


if __name__ == "__main__":
    sys.exit(main())
