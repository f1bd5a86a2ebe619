"""How `auto` divides its time: what a member does not use, or could only list plans with, is for the searches after."""

import pytest

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.portfolio import best_of_members
from services.scheduler.service_placement import every_placement
from services.scheduler.service_placement.every_placement import best_of_all_placements
from services.scheduler.service_placement.services import NOTHING
from services.scheduler.solvers import exhaustive
from services.scheduler.solvers.exhaustive import ExhaustiveSolver, ranked
from services.scheduler.solvers.interface import ProblemTooLargeError, Solution
from services.scheduler.solvers.registry import AUTO, members
from tests.helpers.plans.drawn_services import drawn_with_services
from tests.helpers.plans.problems import plan, problem


class Clock:
    """Time that passes by hand, and by each look at it."""

    def __init__(self, seconds: float, *, each_look_s: float = 0.0) -> None:
        self.left_s, self._each_look_s = seconds, each_look_s

    def __call__(self) -> float:
        self.left_s -= self._each_look_s
        return self.left_s


def test_what_members_leave_is_for_those_that_go_on_from_their_best_plan():
    clock = Clock(16.0)
    given: dict[str, float] = {}
    halves = plan([("h20-0", 1, 8)], [("h800-0", 8)])
    score = CostModel(problem("tiny_02")).score(halves)

    def turn(name, begins, stays, time_left):
        given[name] = time_left()
        if name == ExhaustiveSolver.name:
            clock.left_s -= 1.0
            raise ProblemTooLargeError(name)
        clock.left_s -= min(2.0, time_left())
        return Solution(halves, score, None, False, 1, name)

    best_of_members(turn, time_left=clock, starts=(), kept=NOTHING)

    assert given == {name: pytest.approx(16.0 * share) for name, share in members().items()} | {AUTO: 7.0}


def test_plans_that_can_no_longer_be_listed_leave_the_rest_of_the_time_to_the_others():
    clock = Clock(16.0)
    turns: list[str] = []
    halves = plan([("h20-0", 1, 8)], [("h800-0", 8)])
    score = CostModel(problem("tiny_02")).score(halves)

    def turn(name, begins, stays, time_left):
        turns.append(name)
        if turns.count(ExhaustiveSolver.name) == 2 and name == ExhaustiveSolver.name:
            raise ProblemTooLargeError(name)
        return Solution(halves, score, None, False, 1, name)

    assert best_of_members(turn, time_left=clock, starts=(), kept=NOTHING).plan == halves
    assert turns == [*members(), ExhaustiveSolver.name, AUTO]


def test_exhaustive_search_lists_plans_for_a_quarter_of_its_time_at_most():
    clock = Clock(400.0, each_look_s=1.0)

    with pytest.raises(ProblemTooLargeError, match="more than could be listed in this time"):
        ExhaustiveSolver().solve(CostModel(problem("str_01")), time_left=clock, seed=0)

    assert 299.0 >= clock.left_s >= 290.0


def test_exhaustive_search_stops_while_it_bounds_plans(monkeypatch):
    clock = Clock(1.0)
    bounding = exhaustive.GenerationBound

    def late(model):
        clock.left_s = 0.0
        return bounding(model)

    monkeypatch.setattr(exhaustive, "GenerationBound", late)
    with pytest.raises(ProblemTooLargeError):
        ranked(CostModel(problem("tiny_02")), time_left=clock)


def test_a_list_that_time_ends_keeps_the_best_plan_with_services(monkeypatch):
    model = CostModel(drawn_with_services(20))
    whole = best_of_all_placements(model, time_left=lambda: 1000.0)
    lists = iter(range(1000))

    def ended(*arguments, **stated):
        if next(lists) == 1:
            raise ProblemTooLargeError("no time for the second list")
        return ranked(*arguments, **stated)

    monkeypatch.setattr(every_placement, "ranked", ended)
    found = best_of_all_placements(model, time_left=lambda: 1000.0)

    assert next(lists) == 2
    assert not found.is_optimal
    assert 0 < found.score.samples_per_second <= whole.score.samples_per_second
    assert found.upper_bound_samples_per_second >= whole.score.samples_per_second
