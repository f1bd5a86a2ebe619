"""What each part of HetRL's search and AReaL-Hex's partition phase is worth at an equal number of candidates.

python -m benchmarks.scheduler.ablations PROBLEM... [--candidates N] [--seeds N] [--json]

Each cell is the throughput reached over that of the best plan known (of `auto` and of all runs here): the mean over the
seeds, and the worst. Candidates are counted, not timed, so nothing depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import read_problem
from services.scheduler.solvers.multilevel import MultilevelSolver
from services.scheduler.solvers.partition import PartitionSolver
from services.scheduler.solvers.registry import AUTO

AMPLE_S = 3600.0
AUTO_S = 20.0
"""Of the portfolio, for the best plan known."""


def reached(model: CostModel, *, candidates: int, seed: int) -> dict[str, float]:
    """Samples per second of each variant."""
    cut = PartitionSolver().solve(model, time_left=lambda: AMPLE_S, seed=seed)
    starts = (cut.plan,) if cut.plan is not None else ()

    def run(begins: tuple[PlanDocument, ...] = starts, **switches: bool) -> float:
        solver = MultilevelSolver(max_candidates=candidates, **switches)  # type: ignore[arg-type]
        return solver.solve(model, time_left=lambda: AMPLE_S, seed=seed, starts=begins).score.samples_per_second

    return {
        "full": run(),
        "no partition phase": run(()),
        "no halving": run((), has_halving=False),
        "no cross-group swaps": run((), has_cross_swaps=False),
        "neither": run((), has_halving=False, has_cross_swaps=False),
        "partition alone": cut.score.samples_per_second,
    }


def measure(path: Path, *, candidates: int, num_seeds: int) -> dict[str, tuple[float, float]]:
    """Mean and worst over the seeds of each variant, as shares of the best plan known."""
    model = CostModel(read_problem(path))
    end_s = time.monotonic() + AUTO_S
    known = solve(model, AUTO, time_left=lambda: end_s - time.monotonic()).score.samples_per_second
    runs = [reached(model, candidates=candidates, seed=seed) for seed in range(num_seeds)]
    best = max(known, *(rate for run in runs for rate in run.values()))
    return {name: (mean(run[name] for run in runs) / best, min(run[name] for run in runs) / best) for name in runs[0]}


def table(rows: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """Markdown."""
    names = list(next(iter(rows.values())))
    lines = [f"| problem | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    for problem, cells in rows.items():
        shown = (f"{cells[name][0]:.3f} ({cells[name][1]:.3f})" for name in names)
        lines.append(f"| {problem} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="+", type=Path)
    parser.add_argument("--candidates", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = {
        path.stem: measure(path, candidates=arguments.candidates, num_seeds=arguments.seeds)
        for path in arguments.problems
    }
    print(json.dumps(rows, indent=2) if arguments.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
