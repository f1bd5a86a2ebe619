"""How soon `auto` is about as good as it gets.

python -m benchmarks.scheduler.times [PROBLEM...] [--seeds N]

Without problems: AReaL-Hex's clusters of 24 to 56 GPUs and HetRL's 64 in three countries. Each is solved with the time
that its size is given in LIMITS_S, and once with AMPLE times as much. A row tells what the first reached of the best
known, and after how many seconds it had a plan within 2 % of that: seconds of CPU, of one core, and of the clock. The
limit is of CPU too, so that what else the machine does changes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scheduler.comparisons import hetrl_cluster, hex_cluster
from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem, read_problem
from services.scheduler.solvers.registry import AUTO

LIMITS_S = {24: 5.0, 32: 8.0, 40: 12.0, 56: 20.0, 64: 30.0}
"""Seconds by GPUs; problems in between have the next larger one's, larger ones the last."""
AMPLE = 4.0
CLOSE = 0.98


class Watched(CostModel):
    """A cost model that notes when a better plan than all before was scored."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._began_s = time.process_time(), time.monotonic()
        self.better: list[tuple[float, float, float]] = []
        """Samples per second, seconds of CPU, seconds of the clock; the first is the worst."""

    def score(self, plan: PlanDocument) -> Score | Infeasible:
        """See CostModel."""
        found = super().score(plan)
        if not self.better or found.samples_per_second > self.better[-1][0]:
            cpu_s, clock_s = time.process_time() - self._began_s[0], time.monotonic() - self._began_s[1]
            self.better.append((found.samples_per_second, cpu_s, clock_s))
        return found


@dataclass(frozen=True, slots=True)
class Row:
    """One problem, one seed."""

    share: float
    """Of the best known that was reached within the limit."""
    close_cpu_s: float | None
    """When it was within 2 % of that; None: never."""
    close_clock_s: float | None


def measure(problem: Problem, *, seeds: Sequence[int], limit_s: float) -> list[Row]:
    """A row for each seed."""
    runs = [_solved(problem, seed, limit_s) for seed in seeds]
    ample = _solved(problem, seeds[0], AMPLE * limit_s)
    best = max(run.better[-1][0] for run in (*runs, ample))
    return [_row(run, best) for run in runs]


def limit_of(problem: Problem) -> float:
    """Seconds that a problem of this size is given."""
    return next((limit for gpus, limit in LIMITS_S.items() if _gpus(problem) <= gpus), max(LIMITS_S.values()))


def _row(run: Watched, best: float) -> Row:
    for rate, cpu_s, clock_s in run.better:
        if rate >= CLOSE * best:
            return Row(run.better[-1][0] / best, cpu_s, clock_s)
    return Row(run.better[-1][0] / best, None, None)


def _solved(problem: Problem, seed: int, limit_s: float) -> Watched:
    watched = Watched(problem)
    began_s = time.process_time()
    solve(watched, AUTO, time_left=lambda: began_s + limit_s - time.process_time(), seed=seed)
    return watched


def _gpus(problem: Problem) -> int:
    return sum(node.count * node.gpus for node in problem.nodes)


def _own() -> Iterator[Problem]:
    for h20 in (2, 3, 4, 6):
        yield hex_cluster("7b", 1, h20)
    yield hetrl_cluster("S3", "8b")


def main() -> int:
    """Print the table; exit status 1 where a row is not within 2 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    problems = [read_problem(path) for path in arguments.problems] or list(_own())
    print("| problem | GPUs | limit, s | seed | reached | within 2 % after, s of CPU | s |\n" + "|---" * 7 + "|")
    is_late = False
    for problem in problems:
        limit_s = limit_of(problem)
        for seed, row in enumerate(measure(problem, seeds=range(arguments.seeds), limit_s=limit_s)):
            told = ["never" if each is None else f"{each:.1f}" for each in (row.close_cpu_s, row.close_clock_s)]
            cells = (problem.id, _gpus(problem), f"{limit_s:g}", seed, f"{row.share:.4f}", *told)
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            is_late = is_late or row.close_cpu_s is None or row.close_cpu_s > limit_s
    return int(is_late)


if __name__ == "__main__":
    sys.exit(main())
