"""Measure whether slow tools hold decoding back: `penstock bench tools`.

penstock bench tools [--json] [--quick]

256 sessions of four turns on one emulated generator of 64 slots and 2,000 tokens/s: single turns without tools, tools
that answer at once, and tools that take 0.1 to 5 s, in turn. What counts is the rate with slow tools over the rate
without tools; at least 0.9 is wanted.
"""

from __future__ import annotations

import statistics
import sys

from benchmarks.command import Progress, Result, measure, print_table, short, suite_parser
from benchmarks.tools import rate
from benchmarks.tools.rate import Workload

CASES: dict[str, tuple[float, float] | None] = {
    "no tools": None,
    "tools of 0 s": (0.0, 0.0),
    "tools of 0.1 to 5 s": (0.1, 5.0),
}
QUICK = Workload(num_sessions=16, num_slots=4, warm_up_s=0.5, window_s=1.0)
NUM_REPETITIONS = 3


async def run(workload: Workload, num_repetitions: int, progress: Progress) -> Result:
    """Measure every case, one after the other, as often as asked."""
    found: dict[str, list[rate.Rate]] = {name: [] for name in CASES}
    for number in range(num_repetitions):
        for name, delays_s in CASES.items():
            found[name].append(await rate.measure(workload, delays_s))
            progress(f"{number + 1}. {name}: {found[name][-1].tokens_per_second:.0f} tokens/s")
    base = statistics.median(each.tokens_per_second for each in found["no tools"])
    return {
        name: {
            "tokens_per_second": statistics.median(each.tokens_per_second for each in rates),
            "least": min(each.tokens_per_second for each in rates),
            "share": statistics.median(each.tokens_per_second for each in rates) / base,
            "mean_decoded": statistics.median(each.mean_decoded for each in rates),
            "mean_held": statistics.median(each.mean_held for each in rates),
        }
        for name, rates in found.items()
    }


def show(result: Result) -> None:
    """Print a row for each case."""
    columns = ("tokens_per_second", "share", "mean_decoded", "mean_held")
    rows = [(name, *(short(case[key]) for key in columns)) for name, case in result.items()]
    print_table("Tools", ("case", "tokens/s", "of no tools", "in the engine", "in hand"), [rows])


def main() -> int:
    """Entry point."""
    arguments = suite_parser(__doc__).parse_args()
    workload, repetitions = (QUICK, 1) if arguments.quick else (Workload(), NUM_REPETITIONS)
    return measure(lambda progress: run(workload, repetitions, progress), show, is_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
