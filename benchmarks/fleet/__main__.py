"""Measure dispatch over fleets of emulated GPUs through real services, next to StreamRL's figures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.command import measure, print_table, suite_parser
from benchmarks.fleet import suite
from console.launch.embedded_redis import redis_executable

PAPER = {"ranker": "0.90, 0.82, 0.79", "oracle": "0.82, 0.67, 0.69"}
"""StreamRL (Zhong et al. 2025), Figure 9: 7B, 32B, 72B."""
_OTHERS = ("ranker", "trained_ranker", "kill")


def main() -> int:
    """Measure and print; returns the exit status."""
    options = suite_parser(__doc__).parse_args()
    plan = suite.QUICK if options.quick else suite.FULL
    return measure(
        lambda progress: suite.run(plan, redis_server=redis_executable(), progress=progress),
        _show,
        is_json=options.json,
    )


def _show(result: dict[str, Any]) -> None:
    print_table(
        "Generation time over random dealing with FIFO: medians (least, largest)",
        ("fleet and regime", "dispatch", "ratio", "emulated seconds", "StreamRL: 7B, 32B, 72B"),
        (_rows(name, numbers) for name, numbers in result.items() if name not in _OTHERS),
    )
    for name in _OTHERS:
        if name in result:
            rows = [(key, f"{value:,.2f}") for key, value in result[name].items()]
            print_table(name, ("number", "value"), [rows])


def _rows(name: str, numbers: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for arm, (least, largest) in numbers["spread"].items():
        dispatch, _, forecast = arm.partition("_")
        paper = PAPER.get(forecast, "") if dispatch == "streamrl" else ""
        ratio = f"{numbers[arm]:.3f} ({least:.3f}, {largest:.3f})"
        yield name, arm.replace("_", ", "), ratio, f"{numbers['generation_s'][arm]:.1f}", paper


if __name__ == "__main__":
    sys.exit(main())
