"""A planning problem in, a plan out: which solver, and what people and programs are told of the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from services.scheduler.cost_model.rm1 import Infeasible, Rm1, Score
from services.scheduler.plan_document import PlanDocument
from services.scheduler.problem import Problem
from services.scheduler.solvers.auto import AutoSolver
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.interface import Solution, Solver, TimeLeft
from services.scheduler.solvers.milp import MilpSolver
from services.scheduler.solvers.multilevel import MultilevelSolver
from services.scheduler.solvers.partition import PartitionSolver
from services.scheduler.solvers.streamrl import StreamRlSolver
from services.scheduler.validate import check_plan

AUTO = "auto"
SOLVERS: dict[str, Solver] = {
    solver.name: solver
    for solver in (
        AutoSolver(),
        ExhaustiveSolver(),
        MilpSolver(),
        PartitionSolver(),
        MultilevelSolver(),
        StreamRlSolver(),
    )
}
Document = dict[str, Any]


def solve(
    rm1: Rm1, solver: str, *, time_left: TimeLeft, seed: int = 0, starts: Sequence[PlanDocument] = ()
) -> Solution:
    """The plan of a solver by its name in SOLVERS, checked; `starts` as of Solver. Raises ProblemTooLargeError."""
    solution = SOLVERS[solver].solve(rm1, time_left=time_left, seed=seed, starts=starts)
    if solution.plan is None:
        return solution
    solution = _without_idlers(rm1, solution, solution.plan)
    if solution.plan is not None:
        check_plan(rm1.problem, solution.plan, solver=solution.solver)
    return solution


def _without_idlers(rm1: Rm1, solution: Solution, plan: PlanDocument) -> Solution:
    """The solution without replicas that add nothing: out of the weights' reach, or left with not one sequence."""
    if not isinstance(solution.score, Score):
        return solution
    idlers = [each.replicas for each in solution.score.generation if each.state is None or each.duty <= 0]
    if not idlers:
        return solution
    smaller = PlanDocument(gen=tuple(each for each in plan.gen if each not in idlers), train=plan.train)
    return replace(solution, plan=smaller, score=rm1.score(smaller))


def plan_document(rm1: Rm1, solution: Solution, *, solve_s: float) -> Document:
    """All that is known of a solution, for programs; docs/planning.md describes the keys. What is unknown is null."""
    problem, score = rm1.problem, solution.score
    document: Document = {
        "problem": problem.id,
        "cost_model": rm1.name,
        "solver": solution.solver,
        "solve_s": solve_s,
        "num_evaluated": solution.num_evaluated,
        "is_feasible": isinstance(score, Score),
        "is_optimal": solution.is_optimal,
        "reason": score.reason if isinstance(score, Infeasible) else None,
        "samples_per_second": score.samples_per_second,
        "upper_bound_samples_per_second": solution.upper_bound_samples_per_second,
        "gap": _gap(solution),
        "rm1_plan": None,
    }
    if isinstance(score, Score) and solution.plan is not None:
        document["rm1_plan"] = solution.plan.model_dump()
        document |= _economy(problem, rm1, score) | _stages(rm1, score)
    return document


def usd_per_hour(problem: Problem) -> float:
    """What the whole cluster costs: idle GPUs are paid for too."""
    return sum(node.price_per_gpu_hour * node.gpus * node.count for node in problem.nodes)


def _gap(solution: Solution) -> float | None:
    bound = solution.upper_bound_samples_per_second
    return 1 - solution.score.samples_per_second / bound if bound else None


def _economy(problem: Problem, rm1: Rm1, score: Score) -> Document:
    tokens_per_second = score.samples_per_second * rm1.demand.completion_tokens
    price = usd_per_hour(problem)
    return {
        "step_s": rm1.demand.samples_per_step / score.samples_per_second,
        "tokens_per_second": tokens_per_second,
        "usd_per_hour": price,
        "usd_per_million_tokens": price / 3600 / tokens_per_second * 1e6,
    }


def _stages(rm1: Rm1, score: Score) -> Document:
    """Idle shares, and who generates and trains how."""
    made = sum(
        each.replicas.count * each.state.samples_per_second * each.duty
        for each in score.generation
        if each.state is not None
    )
    step = score.training
    return {
        "limit": score.limit.value,
        "generation_idle": max(0.0, 1 - score.samples_per_second / made) if made > 0 else None,
        "training_idle": max(0.0, 1 - score.samples_per_second * step.step_s / rm1.demand.samples_per_step),
        "training": {
            "step_s": step.step_s,
            "compute_s": step.compute_s,
            "allreduce_s": step.allreduce_s if math.isfinite(step.allreduce_s) else None,
            "exposed_allreduce_s": step.exposed_allreduce_s,
            "overhead_s": step.overhead_s,
        },
        "generation": [
            {
                **each.replicas.model_dump(),
                "batch": each.state.batch if each.state else 0,
                "decode_step_s": each.state.step_s if each.state else None,
                "samples_per_second": each.replicas.count * each.state.samples_per_second if each.state else 0.0,
                "duty": each.duty,
            }
            for each in score.generation
        ],
    }
