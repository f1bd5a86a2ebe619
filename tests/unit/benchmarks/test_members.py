"""The comparison of the portfolio with its members: budgets are kept, and problems drawn anew are the same."""

import time

from benchmarks.scheduler.members import MEMBERS, Budgeted, plans_left, row, seconds_left
from benchmarks.scheduler.problems.drawn import drawn_problem
from services.scheduler.planning.solve import _checked, solve
from services.scheduler.solvers.multilevel import MultilevelSolver
from services.scheduler.solvers.registry import AUTO


def test_drawn_problems_are_the_same_each_time_and_unlike_each_other():
    assert drawn_problem(3) == drawn_problem(3)
    shapes = {tuple((node.gpu, node.gpus, node.count) for node in drawn_problem(seed).nodes) for seed in range(8)}
    assert len(shapes) == 8


def test_what_is_left_out_of_a_plan_makes_it_no_slower():
    model = Budgeted(drawn_problem(5))
    solver = MultilevelSolver(max_candidates=1000)
    for seed in range(3):
        found = solver.solve(model, time_left=lambda: 1000.0, seed=seed)
        assert _checked(model, found).score.samples_per_second >= found.score.samples_per_second * (1 - 1e-9)


def test_a_budget_of_plans_is_kept_and_auto_is_compared_with_every_member():
    problem = drawn_problem(1)
    model = Budgeted(problem)
    solve(model, "multilevel", time_left=lambda: float(40 - model.num_scored))
    assert 0 < model.num_scored <= 41

    shares, below = row(problem, budget=plans_left(200), seeds=[0])
    assert set(shares) == {AUTO, *MEMBERS}
    assert 0 < max(shares.values()) <= 1
    assert 0 <= below < 0.1


def test_a_budget_of_seconds_is_of_cpu_from_when_a_solver_begins():
    budget = seconds_left(0.2)
    left = budget(Budgeted(drawn_problem(1)))
    assert 0.1 < left() <= 0.2
    began_s = time.process_time()
    while left() > 0:
        assert time.process_time() - began_s < 1.0
    assert budget(Budgeted(drawn_problem(1)))() > 0.1
