"""Measure how good and how fast forecasts of completion lengths are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.command import measure, print_table, suite_parser
from benchmarks.ranker.quickstart_lengths import quickstart_data
from benchmarks.ranker.suite import LIGHT, made_data, run

SEED = 0
NUM_PROMPTS, NUM_PROMPTS_QUICK = 8_192, 320
TARGETS = {("made", "held_out", "ridge", "recall_longest_20_percent"): ">= 0.81"}


def main() -> int:
    """Measure and print; returns the exit status."""
    options = suite_parser(__doc__).parse_args()
    num_prompts = NUM_PROMPTS_QUICK if options.quick else NUM_PROMPTS
    datasets = {
        "made": made_data(seed=SEED, num_prompts=num_prompts),
        "quickstart": quickstart_data(seed=SEED, num_prompts=num_prompts),
    }
    return measure(lambda progress: run(datasets, learners=LIGHT, progress=progress), _show, is_json=options.json)


def _show(result: dict[str, Any]) -> None:
    print_table(
        "Length forecasts",
        ("data", "part", "forecaster", "number", "value", "target"),
        (_rows(name, part, numbers) for name, parts in result.items() for part, numbers in parts.items()),
    )


def _rows(name: str, part: str, numbers: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    flat = {"": {key: value for key, value in numbers.items() if not isinstance(value, dict)}}
    flat |= {key: value for key, value in numbers.items() if isinstance(value, dict)}
    for forecaster, values in flat.items():
        for key, value in values.items():
            yield name, part, forecaster, key, _shown(value), TARGETS.get((name, part, forecaster, key), "")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_shown(each) for each in value)
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
