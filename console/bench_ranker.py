"""`penstock bench ranker`: how well and how quickly lengths are forecast. Progress goes to stderr."""

from __future__ import annotations

from typing import Any

from console.benching import bench

_SEED = 0
_NUM_PROMPTS, _NUM_PROMPTS_QUICK = 8_192, 320
_TARGETS = {("made", "held_out", "ridge", "recall_longest_20_percent"): ">= 0.81"}


def bench_ranker_command(*, is_json: bool, is_quick: bool) -> int:
    """Benchmark the length forecasts of the scheduler; returns the exit status."""
    from benchmarks.ranker.suite import LIGHT, made_data, run
    from console.quick_lengths import quickstart_data

    num_prompts = _NUM_PROMPTS_QUICK if is_quick else _NUM_PROMPTS
    datasets = {
        "made": made_data(seed=_SEED, num_prompts=num_prompts),
        "quickstart": quickstart_data(seed=_SEED, num_prompts=num_prompts),
    }
    return bench(lambda progress: run(datasets, learners=LIGHT, progress=progress), _print_table, is_json=is_json)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Length forecasts")
    for heading in ("data", "part", "forecaster", "number", "value", "target"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
    for name, parts in result.items():
        for part, numbers in parts.items():
            flat = {"": {key: value for key, value in numbers.items() if not isinstance(value, dict)}}
            flat |= {key: value for key, value in numbers.items() if isinstance(value, dict)}
            for forecaster, values in flat.items():
                for key, value in values.items():
                    target = _TARGETS.get((name, part, forecaster, key), "")
                    table.add_row(name, part, forecaster, key, _shown(value), target)
            table.add_section()
    Console().print(table)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_shown(each) for each in value)
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
