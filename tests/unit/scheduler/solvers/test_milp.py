import itertools

import pytest

from services.scheduler.cost_model.reference import CostModel, Score
from services.scheduler.planning.plan_report import report_of
from services.scheduler.planning.solve import solve
from services.scheduler.solvers import exhaustive, milp
from services.scheduler.solvers.exhaustive import ExhaustiveSolver
from services.scheduler.solvers.milp import MilpSolver
from tests.helpers.plans.drawn_problems import drawn
from tests.helpers.plans.problems import counted_scores, problem

OPTIMA = {"tiny_02": 13.170059514017444, "tiny_04": 28.532045676101724, "str_01": 11.394779396221843}


@pytest.fixture(autouse=True)
def _few_kicks(monkeypatch):
    monkeypatch.setattr(milp, "MAX_KICKS", 4)


def ample():
    return 1000.0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimum"), OPTIMA.items())
def test_it_finds_the_optimum_of_small_problems_and_its_bound_is_above(name, optimum):
    solution = MilpSolver().solve(CostModel(problem(name)), time_left=ample, seed=0)

    assert solution.score.samples_per_second == pytest.approx(optimum, rel=0.005)
    assert solution.upper_bound_samples_per_second >= optimum * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_it_agrees_with_exhaustive_search_on_drawn_problems(seed):
    model = CostModel(drawn(seed))
    truth = ExhaustiveSolver().solve(model, time_left=ample, seed=0)
    found = MilpSolver().solve(model, time_left=ample, seed=seed)

    assert truth.is_optimal
    assert isinstance(truth.score, Score)
    assert found.score.samples_per_second == pytest.approx(truth.score.samples_per_second, rel=0.005)
    assert found.upper_bound_samples_per_second >= truth.score.samples_per_second * (1 - 1e-9)


def test_the_same_seed_gives_the_same_plan():
    first, second = (MilpSolver().solve(CostModel(problem("tiny_02")), time_left=ample, seed=3) for _ in range(2))

    assert first == second


def test_a_bound_on_throughput_is_not_claimed_when_time_ended_before_it_was_proved():
    answers = itertools.chain([1.0], itertools.repeat(0.0))
    solution = MilpSolver().solve(CostModel(problem("tiny_04")), time_left=lambda: next(answers), seed=0)

    assert solution.upper_bound_samples_per_second is None
    assert not solution.is_optimal


def test_auto_proves_what_is_small_and_searches_what_is_not(monkeypatch):
    model = CostModel(problem("tiny_02"))
    proved = solve(model, "auto", time_left=ample)
    assert proved.is_optimal
    assert proved.upper_bound_samples_per_second == pytest.approx(OPTIMA["tiny_02"])

    monkeypatch.setattr(exhaustive, "MAX_PLANS", 10)
    searched = solve(model, "auto", time_left=ample)
    assert searched.score.samples_per_second == pytest.approx(OPTIMA["tiny_02"])


@pytest.mark.slow
def test_auto_keeps_the_best_plan_and_the_lowest_bound_of_all(monkeypatch):
    monkeypatch.setattr(exhaustive, "MAX_PLANS", 10)
    model = CostModel(problem("tiny_04"))
    scored = counted_scores(model)
    solution = solve(model, "auto", time_left=lambda: 3000.0 - len(scored))

    assert not solution.is_optimal

    assert solution.score.samples_per_second == pytest.approx(OPTIMA["tiny_04"], rel=0.005)
    assert OPTIMA["tiny_04"] <= solution.upper_bound_samples_per_second <= 33
    assert 0 < report_of(model, solution, solve_s=1).gap < 0.2
