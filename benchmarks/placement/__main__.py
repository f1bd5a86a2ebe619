"""Measure what placing sessions by their prefix saves: `penstock bench placement`.

penstock bench placement [--json] [--quick]

Sessions of four turns on two generators with a vLLM engine each, in rounds that alternate: turns placed by their
session (X-Session-ID), and each turn placed at the generator with the fewest requests under way. Prefix-cache hits, CPU
seconds and times; medians of five rounds each, after one that warms up.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import fields
from pathlib import Path

from benchmarks.command import Progress, Result, measure, print_table, short, suite_parser
from benchmarks.scratch import scratch_folder

NUM_ROUNDS = 5


async def run(folder: Path, *, is_quick: bool, progress: Progress) -> Result:
    """Play every round of both ways."""
    # Imported here: they need torch and vLLM, which the options do not.
    from benchmarks.placement.generators import serving, write_model
    from benchmarks.placement.rounds import Round, Way, Workload, play

    workload, num_rounds = (Workload(num_sessions=4), 1) if is_quick else (Workload(), NUM_ROUNDS)
    found: dict[Way, list[Round]] = {way: [] for way in Way}
    progress("starting two engines")
    async with serving(write_model(folder / "model")) as generators:
        await play(generators, workload, Way.LOAD, seed=0)
        for number in range(num_rounds):
            for index, way in enumerate(Way):
                measured = await play(generators, workload, way, seed=1 + 2 * number + index)
                found[way].append(measured)
                progress(f"{number + 1}. {way}: {measured.duration_s:.1f} s, {measured.cached_share:.0%} cached")
    return {
        way: {
            field.name: {
                "median": statistics.median(getattr(each, field.name) for each in rounds),
                "range": [function(getattr(each, field.name) for each in rounds) for function in (min, max)],
            }
            for field in fields(Round)
        }
        for way, rounds in found.items()
    }


def show(result: Result) -> None:
    """Print a row for each number."""
    names = next(iter(result.values()))
    rows = []
    for name in names:
        row = [name]
        for case in result.values():
            low, high = case[name]["range"]
            row.append(f"{short(case[name]['median'])} ({short(low)} to {short(high)})")
        rows.append(row)
    print_table("Placement", ("number", *result), [rows])


def main() -> int:
    """Entry point."""
    arguments = suite_parser(__doc__).parse_args()
    with scratch_folder() as folder:
        return measure(
            lambda progress: run(folder, is_quick=arguments.quick, progress=progress), show, is_json=arguments.json
        )


if __name__ == "__main__":
    sys.exit(main())
