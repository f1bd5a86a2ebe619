"""Measure bringing weights to generators: full contents, deltas, a slow link, the swap in an engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.command import measure, print_table, short, suite_parser
from benchmarks.weights import suite, swap

TARGETS = {
    "full.ratio_to_bare_download": ">= 0.7",
    "delta.bytes_ratio": "<= 0.05",
    "link.time_ratio": "<= 1.2",
    "link_copies": "1 and headers",
}


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = suite_parser(__doc__)
    parser.add_argument(
        "--engine", choices=swap.ENGINES, default=swap.ENGINES[0], help="engine whose pauses are measured (%(default)s)"
    )
    options = parser.parse_args()
    plan = suite.QUICK if options.quick else suite.FULL
    return measure(
        lambda progress: suite.run(plan, engine=options.engine, progress=progress), _show, is_json=options.json
    )


def _show(result: dict[str, Any]) -> None:
    print_table(
        "Weights: medians of interleaved repetitions", ("number", "median", "spread", "target"), [_rows(result, "")]
    )


def _rows(numbers: dict[str, Any], prefix: str) -> Iterator[tuple[str, ...]]:
    spreads = numbers.get("spread", {})
    for name, value in numbers.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and name != "spread":
            yield from _rows(value, f"{path}.")
        elif isinstance(value, int | float):
            yield path, short(value), " to ".join(map(short, spreads.get(name, ()))), TARGETS.get(path, "")


if __name__ == "__main__":
    sys.exit(main())
