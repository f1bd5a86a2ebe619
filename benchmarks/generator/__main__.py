"""Measure in-flight updates on a real vLLM engine, and concurrency on it and on an emulated GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.command import measure, print_table, suite_parser
from benchmarks.generator import suite

TARGETS = {
    "throughput_ratio": ">= 0.9",
    "cpu_ratio": ">= 0.9",
    "num_lost": "0",
    "max_logprob_difference": "<= 1e-4",
    "ratio_to_best_calm_fixed": ">= 0.95",
    "preempted_share": "<= 0.02",
}


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = suite_parser(__doc__)
    parser.add_argument("--only", choices=suite.PARTS, metavar="PART", help=f"one part: {', '.join(suite.PARTS)}")
    options = parser.parse_args()
    plan = suite.QUICK if options.quick else suite.FULL
    parts = suite.PARTS if options.only is None else (options.only,)
    return measure(lambda progress: suite.run(plan, progress=progress, parts=parts), _show, is_json=options.json)


def _show(result: dict[str, Any]) -> None:
    subjects = {mode: result[mode] for mode in ("keep", "recompute") if mode in result} | result["concurrency"]
    print_table(
        "Generator: updates in flight by mode, and concurrency by workload",
        ("subject", "number", "value", "target"),
        (_rows(subject, numbers) for subject, numbers in subjects.items()),
    )


def _rows(subject: str, numbers: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in numbers.items():
        if isinstance(value, int | float):
            yield subject, name, f"{value:,.4g}", TARGETS.get(name, "")


if __name__ == "__main__":
    sys.exit(main())
