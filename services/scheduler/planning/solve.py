"""A planning problem in, a plan out: which solver, and what people and programs are told of the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from services.scheduler.cost_model.reference import CostModel, Generation, Infeasible, Limit, Score
from services.scheduler.planning.market import alternatives, purchases, usd_per_hour
from services.scheduler.problem.plan_check import check_plan, violations
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem
from services.scheduler.solvers.interface import Solution, TimeLeft
from services.scheduler.solvers.regeneration import regenerate
from services.scheduler.solvers.registry import SOLVERS, make_solver

for _name in SOLVERS:
    make_solver(_name)  # Its imports take no time of a search.
Document = dict[str, Any]


def solve(
    model: CostModel, solver: str, *, time_left: TimeLeft, seed: int = 0, starts: Sequence[PlanDocument] = ()
) -> Solution:
    """The plan of a solver by its name in SOLVERS, checked; `starts` as of Solver. Raises ProblemTooLargeError."""
    return _checked(model, make_solver(solver).solve(model, time_left=time_left, seed=seed, starts=starts))


def solve_generation(model: CostModel, running: PlanDocument, *, time_left: TimeLeft) -> Solution:
    """The best generators found around the training pool of a plan in force, checked."""
    return _checked(model, regenerate(model, running, time_left=time_left))


def _checked(model: CostModel, solution: Solution) -> Solution:
    if solution.plan is None:
        return solution
    solution = _without_idlers(model, solution, solution.plan)
    if solution.plan is not None:
        check_plan(model.problem, solution.plan, solver=solution.solver)
    return solution


def _without_idlers(model: CostModel, solution: Solution, plan: PlanDocument) -> Solution:
    """The solution without replicas that add nothing: out of the weights' reach, or left with not one sequence.

    Where it is slower without them, they stay if they may.
    """
    if not isinstance(solution.score, Score):
        return solution
    idlers = [each.replicas for each in solution.score.generation if each.state is None or each.duty <= 0]
    if not idlers:
        return solution
    smaller = PlanDocument(gen=tuple(each for each in plan.gen if each not in idlers), train=plan.train)
    score = model.score(smaller)
    if score.samples_per_second < solution.score.samples_per_second * (1 - 1e-9) and not violations(
        model.problem, plan
    ):
        # Their share of the samples under way makes the others' batches smaller, which tails or slow links may want.
        return solution
    return replace(solution, plan=smaller, score=score)


def advice(model: CostModel, solution: Solution, *, time_left: TimeLeft, seed: int = 0) -> Document:
    """What the next dollar would buy and what fewer would, as keys of the plan's document; until time is over."""
    if solution.plan is None:
        return {"next_purchases": [], "alternatives": []}
    half_s = time_left() / 2
    bought = purchases(model, solution, time_left=lambda: time_left() - half_s, seed=seed)
    front = alternatives(model, solution, time_left=time_left, seed=seed)
    tokens = model.demand.completion_tokens
    return {
        "next_purchases": [asdict(each) for each in bought],
        "alternatives": [
            {
                "usd_per_hour": each.usd_per_hour,
                "samples_per_second": each.samples_per_second,
                "usd_per_million_tokens": _usd_per_million(each.usd_per_hour, each.samples_per_second * tokens),
                "machines": dict(each.machines),
                "rm1_plan": each.plan.model_dump(),
            }
            for each in front
        ],
    }


def plan_document(model: CostModel, solution: Solution, *, solve_s: float) -> Document:
    """All that is known of a solution, for programs; docs/planning.md describes the keys. What is unknown is null."""
    problem, score = model.problem, solution.score
    document: Document = {
        "problem": problem.id,
        "cost_model": model.name,
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
        document |= _economy(problem, model, score) | _stages(model, score)
    return document


def _gap(solution: Solution) -> float | None:
    bound = solution.upper_bound_samples_per_second
    return 1 - solution.score.samples_per_second / bound if bound else None


def _economy(problem: Problem, model: CostModel, score: Score) -> Document:
    tokens_per_second = score.samples_per_second * model.demand.completion_tokens
    price = usd_per_hour(problem)
    return {
        "step_s": model.demand.samples_per_step / score.samples_per_second,
        "tokens_per_second": tokens_per_second,
        "usd_per_hour": price,
        "usd_per_million_tokens": _usd_per_million(price, tokens_per_second),
    }


def _usd_per_million(usd_an_hour: float, tokens_per_second: float) -> float:
    return usd_an_hour / 3600 / tokens_per_second * 1e6


def bottleneck(score: Score) -> str:
    """What to make faster first, in a few words."""
    if score.limit is Limit.TAIL:
        return "the longest samples: they must finish inside their staleness window"
    if score.limit is Limit.TRAINING:
        step = score.training
        parts = {
            "computation": step.compute_s,
            "the all-reduce that computation does not hide": step.exposed_allreduce_s,
            "the fixed time of a step": step.overhead_s,
        }
        longest = max(parts, key=lambda part: parts[part])
        return f"training: {longest}, {parts[longest]:.3g} s of a step of {step.step_s:.3g} s"
    behind = {each.replicas.node: each.duty for each in score.generation if each.duty < 1}
    if behind:
        slowest = min(behind, key=lambda node: behind[node])
        return f"generation, and links: weights reach {slowest} late, {behind[slowest]:.0%} of its samples are fresh"
    made = sum(_fresh_per_second(each) for each in score.generation)
    if score.samples_per_second < made / 2:
        share = 1 - score.samples_per_second / made
        return f"generation: weight updates pause it for {share:.0%} of the time, as steps are so short"
    return "generation: decoding takes all the GPUs it has"


def _fresh_per_second(each: Generation) -> float:
    """Samples that equal replicas make between pauses, those that will be fresh enough."""
    return each.replicas.count * each.state.samples_per_second * each.duty if each.state is not None else 0.0


def _stages(model: CostModel, score: Score) -> Document:
    """Idle shares, and who generates and trains how."""
    made = sum(_fresh_per_second(each) for each in score.generation)
    step = score.training
    return {
        "limit": score.limit.value,
        "bottleneck": bottleneck(score),
        "generation_idle": max(0.0, 1 - score.samples_per_second / made) if made > 0 else None,
        "training_idle": max(0.0, 1 - score.samples_per_second * step.step_s / model.demand.samples_per_step),
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
