"""The portfolio next to each of its members alone, all with the same budget.

python -m benchmarks.scheduler.members [PROBLEM...] [--drawn N] [--seeds N] [--plans N | --seconds S]

The budget is a number of plans that may be scored, so nothing depends on the machine but the integer programs, which
may take PLAN_S for each plan and end long before; or it is seconds of CPU. Each cell is the throughput over the best
that any of a row reached, the least over the seeds; "below" is how far `auto` is below the best member of the same
seed, at most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.scheduler.problems.drawn import drawn_problem
from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem, read_problem
from services.scheduler.solvers.interface import ProblemTooLargeError, TimeLeft
from services.scheduler.solvers.registry import AUTO, SOLVERS

PLAN_S = 0.01
"""What a plan that is scored counts for."""
MEMBERS = tuple(name for name in SOLVERS if name != AUTO)


class Budgeted(CostModel):
    """A cost model that counts the plans it scores."""

    num_scored = 0

    def score(self, plan: PlanDocument) -> Score | Infeasible:
        """See CostModel."""
        self.num_scored += 1
        return super().score(plan)


Budget = Callable[[Budgeted], TimeLeft]
"""What is left for a solver that scores plans with this model."""


def plans_left(num_plans: int) -> Budget:
    """So many plans may be scored."""
    return lambda model: lambda: (num_plans - model.num_scored) * PLAN_S


def seconds_left(budget_s: float) -> Budget:
    """So many seconds of this process's CPU, from now on."""

    def begun(_model: Budgeted) -> TimeLeft:
        end_s = time.process_time() + budget_s
        return lambda: end_s - time.process_time()

    return begun


def reached(problem: Problem, solver: str, *, budget: Budget, seed: int) -> float:
    """Samples per second that a solver finds within a budget; 0 where it finds none or cannot treat the problem."""
    model = Budgeted(problem)
    try:
        solution = solve(model, solver, time_left=budget(model), seed=seed)
    except ProblemTooLargeError:
        return 0.0
    return solution.score.samples_per_second


def row(problem: Problem, *, budget: Budget, seeds: Sequence[int]) -> tuple[dict[str, float], float]:
    """Each solver's share of the best reached, the least over the seeds; and how far `auto` is below a member."""
    rates = [{name: reached(problem, name, budget=budget, seed=seed) for name in (AUTO, *MEMBERS)} for seed in seeds]
    best = max(max(each.values()) for each in rates)
    if not best:
        return dict.fromkeys(rates[0], 1.0), 0.0
    below = max(1 - each[AUTO] / max(each.values()) for each in rates)
    return {name: min(each[name] for each in rates) / best for name in rates[0]}, below


def main() -> int:
    """Print the table; exit status 1 where `auto` is below a member."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", type=Path)
    parser.add_argument("--drawn", type=int, default=20, help="how many drawn problems")
    parser.add_argument("--seeds", type=int, default=3)
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument("--plans", type=int, default=1000, help="how many plans may be scored")
    budgets.add_argument("--seconds", type=float, help="seconds of CPU in place of plans")
    options = parser.parse_args()
    budget = plans_left(options.plans) if options.seconds is None else seconds_left(options.seconds)
    problems = [read_problem(path) for path in options.problems] + [
        drawn_problem(seed) for seed in range(options.drawn)
    ]
    print(f"| problem | {' | '.join((AUTO, *MEMBERS))} | below |\n|{'---|' * (len(MEMBERS) + 3)}")
    most = 0.0
    for problem in problems:
        shares, below = row(problem, budget=budget, seeds=range(options.seeds))
        told = (f"{share:.4f}" if share else "-" for share in shares.values())
        print(f"| {problem.id} | {' | '.join(told)} | {below:.2%} |", flush=True)
        most = max(most, below)
    return int(most > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
