"""Implements the planning pipeline: from a problem's cost model to a checked plan and its report.

The command line and the service both plan here. It has no clock: callers say how much time is left.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from services.scheduler.cost_model.reference import CostModel, Infeasible, Score
from services.scheduler.planning.alike_entries import with_joined_entries
from services.scheduler.planning.market import alternatives, purchases
from services.scheduler.planning.plan_report import FeasiblePlan, PlanReport, report_of
from services.scheduler.planning.portfolio import best_of_members
from services.scheduler.planning.relayout import relaid
from services.scheduler.problem.plan_check import check_plan, violations
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.service_placement.service_places import with_center, with_relays, without_places
from services.scheduler.service_placement.services import (
    NOTHING,
    has_all_to_place,
    proposals_once,
    with_all_placements,
    with_places,
    with_services,
)
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.interface import Plans, Solution, TimeLeft, infeasibility, part_of
from services.scheduler.solvers.regeneration import regenerate
from services.scheduler.solvers.registry import AUTO, SOLVERS, make_solver

_SOLVE_SHARE = 0.7
_SIMULATED_SHARE = 0.95
"""Share of the time after which the search, then the simulation, ends; the rest looks for what to buy or give up
next."""

for _name in SOLVERS:
    make_solver(_name)  # Imported here so that importing does not take search time.


class Simulate(Protocol):
    """Simulates a run of a plan."""

    def __call__(self, model: CostModel, plan: PlanDocument, *, time_left: TimeLeft, seed: int) -> float | None:
        """Samples per second of the run; None if it gets stuck, or time is too short."""


def make_plan(
    model: CostModel,
    solver: str,
    *,
    time_left: TimeLeft,
    seed: int = 0,
    starts: Plans = (),
    running: PlanDocument | None = None,
    critic_machines: Collection[str] | None = None,
) -> PlanReport:
    """A checked plan and what it achieves. Raises ProblemTooLargeError.

    Args:
        model: Cost model of the problem.
        solver: Its name, one of SOLVERS.
        time_left: Time left for the search.
        seed: Seed of the search.
        starts: Initial plans, as in Solver.
        running: A plan in force whose training pool is kept: only generators are planned, whichever the solver.
        critic_machines: Those on which a critic may be placed that `starts` and `running` lack; None for any.
    """
    budget_s = time_left()
    before = starts[0] if running is None and starts else running
    # Scorers may move where the search begins with a plan, and not where one runs.
    kept = NOTHING if before is None else before.model_copy(update={"score": ()})
    if kept.critic is not None and kept.critic.is_beside_trainer:
        # A critic stays where its steps are, and so does a trainer that is to be beside it.
        running = before
    if running is None:
        begins = tuple(map(without_places, starts))
        solution = solve(
            model, solver, time_left=time_left, seed=seed, starts=begins, kept=kept, critic_machines=critic_machines
        )
    else:
        around = _regenerated(model, without_places(running), time_left=time_left, critic_machines=critic_machines)
        solution = _checked(model, around)
    if solution.plan is not None:
        solution = replace(solution, plan=with_relays(model.problem, solution.plan))
    return report_of(model, solution, solve_s=budget_s - time_left())


def _regenerated(
    model: CostModel, running: PlanDocument, *, time_left: TimeLeft, critic_machines: Collection[str] | None
) -> Solution:
    """Generators around a plan's trainers and services; services that it lacks are placed as well.

    Workers with a GPU hold nothing that another one could not do again, so they move where that is faster.
    """

    def search(rest: CostModel, time_left: TimeLeft) -> Solution:
        return regenerate(rest, running, time_left=time_left)

    def around(kept: PlanDocument, time_left: TimeLeft) -> Solution:
        return with_services(model, search, time_left=time_left, kept=kept, critic_machines=critic_machines)

    free = running.model_copy(update={"score": (), "reward_gpus": ()})
    if free == running:
        return around(running, time_left)
    found = around(running, part_of(time_left, 0.5))
    return max(found, around(free, time_left), key=lambda solution: solution.score.samples_per_second)


def make_advised_plan(
    model: CostModel,
    solver: str,
    *,
    time_left: TimeLeft,
    simulate: Simulate,
    seed: int = 0,
    starts: Plans = (),
) -> PlanReport:
    """A plan with all its services, its simulated rate, and what to buy or give up next; arguments as in make_plan."""
    solving, simulating = (part_of(time_left, share) for share in (_SOLVE_SHARE, _SIMULATED_SHARE))
    report = make_plan(model, solver, time_left=solving, seed=seed, starts=starts)
    if not isinstance(report, FeasiblePlan):
        return report
    simulated = simulate(model, report.plan, time_left=simulating, seed=seed)
    return replace(
        report,
        plan=with_center(
            model.problem, report.plan, next(iter(starts), None), tokens_per_second=report.tokens_per_second
        ),
        simulated_samples_per_second=simulated,
        next_purchases=purchases(model, report.solution, time_left=part_of(time_left, 0.5), seed=seed),
        alternatives=alternatives(model, report.solution, time_left=time_left, seed=seed),
    )


def solve(
    model: CostModel,
    solver: str,
    *,
    time_left: TimeLeft,
    seed: int = 0,
    starts: Plans = (),
    kept: PlanDocument = NOTHING,
    critic_machines: Collection[str] | None = None,
) -> Solution:
    """The checked plan of the named solver in SOLVERS. Raises ProblemTooLargeError.

    `starts` as in Solver; `kept` has services that stay where they are, `critic_machines` as in `with_services`.
    """
    problem = with_joined_entries(model.problem)
    joined = model if problem is model.problem else model.over(problem)
    found = _solve(
        joined, solver, time_left=time_left, seed=seed, starts=starts, kept=kept, critic_machines=critic_machines
    )
    if joined is model or found.plan is None:
        return found
    check_plan(model.problem, found.plan, solver=found.solver)
    return replace(found, score=model.score(found.plan))


def _solve(
    model: CostModel,
    solver: str,
    *,
    time_left: TimeLeft,
    seed: int,
    starts: Plans,
    kept: PlanDocument,
    critic_machines: Collection[str] | None,
) -> Solution:
    """`solve` for a problem without entries of equal machines."""
    propose = proposals_once(model, critic_machines)

    def turn(name: str, begins: Plans, stays: PlanDocument, time_left: TimeLeft) -> Solution:
        def search(rest: CostModel, time_left: TimeLeft) -> Solution:
            if (reason := infeasibility(rest)) is not None:
                return Solution(None, Infeasible(reason), 0.0, True, 0, name)
            return make_solver(name).solve(rest, time_left=time_left, seed=seed, starts=begins)

        if not has_all_to_place(model.problem, stays):
            found = with_services(model, search, time_left=time_left, kept=stays, critic_machines=critic_machines)
        elif name == ExhaustiveSolver.name and critic_machines is None:
            found = with_all_placements(model, time_left=time_left, starts=begins, kept=stays)
        else:
            found = with_places(
                model, search, time_left=time_left, kept=stays, critic_machines=critic_machines, propose=propose
            )
        return _checked(model, found)

    if solver == AUTO:
        return best_of_members(turn, time_left=time_left, starts=starts, kept=kept)
    return turn(solver, starts, kept, time_left)


def _checked(model: CostModel, solution: Solution) -> Solution:
    if solution.plan is None:
        return solution
    solution = _without_idlers(model, relaid(model, solution), solution.plan)
    if solution.plan is not None:
        if model.pool_memory.is_even:
            solution = _with_batches(solution, solution.plan)
        assert solution.plan is not None
        check_plan(model.problem, solution.plan, solver=solution.solver)
    return solution


def _with_batches(solution: Solution, plan: PlanDocument) -> Solution:
    """The solution whose plan states how many samples each replica decodes at once; RM-1's plans do not."""
    if not isinstance(solution.score, Score):
        return solution
    gen = tuple(
        each.replicas.model_copy(update={"batch": each.state.batch if each.state is not None else None})
        for each in solution.score.generation
    )
    plan = plan.model_copy(update={"gen": gen})
    generation = tuple(
        replace(each, replicas=replicas) for each, replicas in zip(solution.score.generation, gen, strict=True)
    )
    return replace(solution, plan=plan, score=replace(solution.score, generation=generation))


def _without_idlers(model: CostModel, solution: Solution, plan: PlanDocument) -> Solution:
    """The solution without useless replicas: those that weights cannot reach, or with less than one sequence.

    If it is slower without them, they stay if allowed.
    """
    if not isinstance(solution.score, Score):
        return solution
    idlers = [each.replicas for each in solution.score.generation if each.state is None or each.duty <= 0]
    if not idlers:
        return solution
    smaller = plan.model_copy(update={"gen": tuple(each for each in plan.gen if each not in idlers)})
    score = model.score(smaller)
    if score.samples_per_second < solution.score.samples_per_second * (1 - 1e-9) and not violations(
        model.problem, plan
    ):
        # Their share of the samples under way makes the others' batches smaller, which can help with tails or slow
        # links.
        return solution
    return replace(solution, plan=smaller, score=score)
