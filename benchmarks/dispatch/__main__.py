"""Play every scenario of the grid under every policy and print a table.

penstock bench dispatch [--fresh] [--groups N] [--group-size N] [--only WORD] [--seeds N] [--first-seed N]
    [--json]

Times are of the simulator's virtual clock and compare policies, not the speed of fleets. Each cell is the sum of the
makespans over the seeds, relative to the best policy other than auto; `bound` is the best one's over a lower bound that
no policy can beat.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.dispatch import fresh_scenarios
from benchmarks.dispatch.queue_simulation import Scenario, lower_bound_s, simulate
from benchmarks.dispatch.scenarios import FORECASTS, fleets, make_scenario, workload_names
from penstock.config import ConfigError

POLICIES = ("fifo", "least_loaded", "lpt", "streamrl", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One scenario over all seeds."""

    scenario: str
    bound_ratio: float
    ratios: dict[str, float]
    """Makespan over the best one's, by policy; `fifo, no moves` is fifo without moves of leased work."""
    num_moves: int
    """Moves under auto."""


def main() -> int:
    """Play and print; returns the exit status. Raises ConfigError if no scenario is chosen."""
    options = _options()
    chosen = [(name, make) for name, make in _scenarios(options) if options.only in name]
    if not chosen:
        words = dict.fromkeys(word for name, _ in _scenarios(options) for word in name.split(", "))
        raise ConfigError(f"--only {options.only!r}: no scenario's name contains it; known words: {', '.join(words)}")
    cells: list[Cell] = []
    if not options.json:
        print("| scenario | bound | fifo, no moves | " + " | ".join(POLICIES) + " | moves |")
        print("|---" * (len(POLICIES) + 4) + "|")
    for name, make in chosen:
        cells.append(_measure(name, make, range(options.first_seed, options.first_seed + options.seeds)))
        if not options.json:
            print(_row(cells[-1]), flush=True)
    worst = max(cells, key=lambda cell: cell.ratios["auto"])
    if options.json:
        print(json.dumps([asdict(cell) for cell in cells]))
    else:
        means = {name: sum(cell.ratios[name] for cell in cells) / len(cells) for name in cells[0].ratios}
        bound = sum(cell.bound_ratio for cell in cells) / len(cells)
        print(_row(Cell(scenario="mean", bound_ratio=bound, ratios=means, num_moves=0)))
        print(f"\nworst of auto: {worst.ratios['auto']:.3f} ({worst.scenario})", file=sys.stderr)
    return 0


def _scenarios(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[int], Scenario]]]:
    """Name, and the function that makes a seed's scenario."""
    if options.fresh:
        for fleet, lengths, forecast, arrival in fresh_scenarios.names():
            yield (
                f"{fleet}, {lengths}, {forecast}, {arrival}",
                partial(_fresh, fleet, lengths, forecast, arrival),
            )
        return
    for fleet in fleets():
        for workload in workload_names():
            for forecast in FORECASTS:
                yield f"{fleet}, {workload}, {forecast}", partial(_of_grid, options, fleet, workload, forecast)


def _of_grid(options: argparse.Namespace, fleet: str, workload: str, forecast: str, seed: int) -> Scenario:
    return make_scenario(
        fleet=fleet,
        workload=workload,
        forecast=forecast,
        num_groups=options.groups,
        group_size=options.group_size,
        seed=seed,
    )


def _fresh(fleet: str, lengths: str, forecast: str, arrival: str, seed: int) -> Scenario:
    return fresh_scenarios.make_fresh_scenario(
        fleet=fleet, lengths=lengths, forecast=forecast, arrival=arrival, seed=seed
    )


def _measure(name: str, make: Callable[[int], Scenario], seeds: Iterable[int]) -> Cell:
    started_s = time.perf_counter()
    makespans = dict.fromkeys(("fifo, no moves", *POLICIES), 0.0)
    bound_s, num_moves = 0.0, 0
    for seed in seeds:
        scenario = make(seed)
        bound_s += lower_bound_s(scenario)
        makespans["fifo, no moves"] += simulate(scenario, "fifo", can_move=False).makespan_s
        for policy in POLICIES:
            report = simulate(scenario, policy)
            makespans[policy] += report.makespan_s
            num_moves += report.num_moves if policy == "auto" else 0
    best = min(makespans[policy] for policy in POLICIES if policy != "auto")
    print(f"{name}: {time.perf_counter() - started_s:.1f} s", file=sys.stderr)
    return Cell(
        scenario=name,
        bound_ratio=best / bound_s,
        ratios={policy: makespan / best for policy, makespan in makespans.items()},
        num_moves=num_moves,
    )


def _row(cell: Cell) -> str:
    ratios = " | ".join(f"{ratio:.3f}" for ratio in cell.ratios.values())
    return f"| {cell.scenario} | {cell.bound_ratio:.2f} | {ratios} | {cell.num_moves or ''} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="play the scenarios that nothing was tuned on")
    parser.add_argument("--groups", type=int, default=32, help="prompts per step of the grid")
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt of the grid")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--only", default="", help="play only scenarios whose name contains this")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
