"""`penstock bench fleet`: dispatch over fleets of pretend GPUs through real services, next to StreamRL's figures."""

from __future__ import annotations

from typing import Any

from console.benching import bench
from console.launch.embedded_redis import redis_executable

_PAPER = {"ranker": "0.90, 0.82, 0.79", "oracle": "0.82, 0.67, 0.69"}
"""StreamRL (Zhong et al. 2025), Figure 9: 7B, 32B, 72B."""
_OTHERS = ("ranker", "trained_ranker", "kill")


def bench_fleet_command(*, is_json: bool, is_quick: bool) -> int:
    """Measure, and print a table or JSON; returns the exit status."""
    from benchmarks.fleet import suite

    plan = suite.QUICK if is_quick else suite.FULL
    return bench(
        lambda progress: suite.run(plan, redis_server=redis_executable(), progress=progress),
        _print_tables,
        is_json=is_json,
    )


def _print_tables(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    ratios = Table(title="Generation time over random dealing with FIFO: medians (least, largest)")
    for heading in ("fleet and regime", "dispatch", "ratio", "pretended seconds", "StreamRL: 7B, 32B, 72B"):
        ratios.add_column(heading)
    for name, numbers in result.items():
        if name in _OTHERS:
            continue
        for arm, (least, largest) in numbers["spread"].items():
            dispatch, _, forecast = arm.partition("_")
            paper = _PAPER.get(forecast, "") if dispatch == "streamrl" else ""
            ratio = f"{numbers[arm]:.3f} ({least:.3f}, {largest:.3f})"
            ratios.add_row(name, arm.replace("_", ", "), ratio, f"{numbers['generation_s'][arm]:.1f}", paper)
        ratios.add_section()
    console.print(ratios)
    for name in _OTHERS:
        if name in result:
            table = Table(title=name)
            for heading in ("number", "value"):
                table.add_column(heading)
            for key, value in result[name].items():
                table.add_row(key, f"{value:,.2f}")
            console.print(table)
