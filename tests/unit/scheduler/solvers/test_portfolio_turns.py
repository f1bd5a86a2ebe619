"""The portfolio's turns where one of them cannot treat the problem."""

from __future__ import annotations

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.portfolio import best_of_members
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.service_placement.services import NOTHING
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.interface import Plans, ProblemTooLargeError, Solution, TimeLeft
from tests.helpers.plans.problems import plan, problem

HALVES = plan([("h20-0", 1, 8)], [("h800-0", 8)])


def test_a_plan_survives_an_exhaustive_search_that_has_too_little_time_left() -> None:
    model, calls = CostModel(problem("tiny_02")), list[str]()

    def turn(name: str, starts: Plans, kept: PlanDocument, time_left: TimeLeft) -> Solution:
        calls.append(name)
        if name == ExhaustiveSolver.name and calls.count(name) > 1:
            raise ProblemTooLargeError("more plans than can be listed in this time")
        return Solution(HALVES, model.score(HALVES), None, False, 1, name)

    found = best_of_members(turn, time_left=lambda: 10.0, starts=(), kept=NOTHING)

    assert found.plan == HALVES
    assert calls.count(ExhaustiveSolver.name) == 2
