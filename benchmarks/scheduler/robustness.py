"""What wrong profiles cost: plans made from numbers that are each off by up to 20 %, judged by the true ones.

python -m benchmarks.scheduler.robustness PROBLEM... [--error 0.2] [--draws 50] [--solver auto] [--budget-s 5]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.solve import solve
from services.scheduler.problem.problem import Problem, read_problem
from services.scheduler.solvers.interface import Solution
from services.scheduler.solvers.registry import AUTO

_GPU_NUMBERS = ("tflops_bf16", "hbm_GBps", "ar_bus_GBps", "ar_latency_us")
_CONSTANTS = ("eta_bw", "eta_fl", "eta_prefill", "step_overhead_s", "sync_pause_s")


def misjudged(problem: Problem, random: Random, error: float) -> Problem:
    """The problem with every profiled number off: rates, links, NICs, efficiencies. Memory is known, not profiled."""

    def off(value: float) -> float:
        return value * random.uniform(1 - error, 1 + error)

    gpus = {
        name: gpu.model_copy(update={key: off(getattr(gpu, key)) for key in _GPU_NUMBERS})
        for name, gpu in problem.gpu_types.items()
    }
    constants = {key: off(getattr(problem.cost_model, key)) for key in _CONSTANTS}
    return problem.model_copy(
        update={
            "gpu_types": gpus,
            "nodes": tuple(node.model_copy(update={"nic_Gbps": off(node.nic_Gbps)}) for node in problem.nodes),
            "links": tuple(link.model_copy(update={"bw_Gbps": off(link.bw_Gbps)}) for link in problem.links),
            "cost_model": problem.cost_model.model_copy(update=constants),
        }
    )


def losses(problem: Problem, *, error: float, draws: int, solver: str, budget_s: float) -> list[float]:
    """Of each draw, the share of the true throughput that its plan gives away to the plan made from true numbers."""
    true = CostModel(problem)
    best = _solved(true, solver, budget_s).score.samples_per_second
    found = []
    for seed in range(draws):
        plan = _solved(CostModel(misjudged(problem, Random(seed), error)), solver, budget_s).plan
        found.append(1 - true.score(plan).samples_per_second / best if plan is not None else 1.0)
    return found


def _solved(model: CostModel, solver: str, budget_s: float) -> Solution:
    end_s = time.monotonic() + budget_s
    return solve(model, solver, time_left=lambda: end_s - time.monotonic())


def main() -> int:
    """Print median and worst for each problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="+", type=Path)
    parser.add_argument("--error", type=float, default=0.2)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--solver", default=AUTO)
    parser.add_argument("--budget-s", type=float, default=5)
    arguments = parser.parse_args()
    print("| problem | median | worst |\n|---|---|---|")
    for path in arguments.problems:
        found = losses(
            read_problem(path),
            error=arguments.error,
            draws=arguments.draws,
            solver=arguments.solver,
            budget_s=arguments.budget_s,
        )
        print(f"| {path.stem} | {median(found):.1%} | {max(found):.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
