"""Measure what a unit of work costs a broker at the size of a large fleet, and what fleets of GPUs need by that.

Examples:
  penstock bench scale
  penstock bench scale --json
  penstock bench scale --quick
  penstock bench scale --generators 256 --samples 128 --only fleet
  penstock bench scale --brokers 1 2 --only brokers
  penstock bench scale --mean-tokens 16000 --samples-per-gpu 64

Real brokers, a real Redis and Penstock's own clients; only the tokens are made up. Costs are CPU time of processes. The
needs of fleets and the simulation at 10,000 generators need the parts `chunks` and `fleet`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.command import measure, print_table, short, suite_parser
from benchmarks.scale import suite
from benchmarks.scale.emulated_run import GROUP_SIZE
from benchmarks.scale.needs import Assumptions
from console.launch.embedded_redis import redis_executable
from penstock.config import ConfigError

TARGETS = {
    "us_per_chunk": "<= 15",
    "us_per_token": "<= 0.03",
    "redis_bytes_per_token": "<= 9",
    "broker_mb": "<= 1500",
    "first_call_s": "<= 2",
    "whole_s": "<= 10",
    "us_per_lease": "<= 150",
    "max_stall_ms": "<= 20",
    "conflict_ratio": "< 0.01",
}


def main() -> int:
    """Measure and print; returns the exit status. Raises ConfigError."""
    options = _options()
    plan = suite.QUICK if options.quick else suite.FULL
    load = replace(
        plan.load,
        num_generators=options.generators or plan.load.num_generators,
        samples_each=options.samples or plan.load.samples_each,
        period_s=options.period or plan.load.period_s,
    )
    if load.num_samples % GROUP_SIZE:
        raise ConfigError(
            f"--generators {load.num_generators} --samples {load.samples_each}: {load.num_samples} samples make no "
            f"whole groups of {GROUP_SIZE}; choose a multiple"
        )
    plan = replace(
        plan,
        load=load,
        brokers=options.brokers or plan.brokers,
        num_processes=options.processes or plan.num_processes,
    )
    assumed = Assumptions(
        tokens_per_gpu_s=options.tokens_per_gpu,
        samples_per_gpu=options.samples_per_gpu,
        mean_tokens=options.mean_tokens,
    )
    chosen = options.only or suite.PARTS
    return measure(
        lambda progress: suite.run(plan, chosen, assumed, redis_server=redis_executable(), progress=progress),
        _show,
        is_json=options.json,
    )


def _options() -> argparse.Namespace:
    assumed = Assumptions()
    parser = suite_parser(__doc__)
    parser.add_argument("--generators", type=_positive, help="clients of the fleet; 1,024 unless --quick")
    parser.add_argument("--samples", type=_positive, help="samples of each at once; 64 unless --quick")
    parser.add_argument("--period", type=_seconds, help="each generator sends one request in so many seconds; 8")
    parser.add_argument("--processes", type=_positive, help="processes that play the generators; 2")
    parser.add_argument("--brokers", type=_positive, nargs="+", help="brokers on one run; 1 2 4 8")
    parser.add_argument("--only", choices=suite.PARTS, nargs="+", help="measure only these parts")
    parser.add_argument(
        "--tokens-per-gpu", type=_seconds, default=assumed.tokens_per_gpu_s, help="a second; %(default)g"
    )
    parser.add_argument("--samples-per-gpu", type=_positive, default=assumed.samples_per_gpu, help="%(default)s")
    parser.add_argument(
        "--mean-tokens", type=_seconds, default=assumed.mean_tokens, help="of a completion; %(default)g"
    )
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def _show(result: dict[str, Any]) -> None:
    tables = [list(_rows(name, value)) for name, value in result.items()]
    print_table("Scale", ("what", "number", "value", "target"), tables)


def _rows(name: str, value: Any) -> Iterator[tuple[str, str, str, str]]:
    """The rows of a key; nested ones are named by their path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _rows(f"{name} {key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value, 1):
            yield from _rows(f"{name} {number}", inner)
    else:
        where, _, what = name.rpartition(" ")
        shown = short(value) if isinstance(value, int | float) else str(value)
        yield where or what, what, shown, TARGETS.get(what, "")


if __name__ == "__main__":
    sys.exit(main())
