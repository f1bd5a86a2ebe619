"""How soon the planner is good enough: what counts, and when."""

from benchmarks.scheduler import times
from tests.helpers.plans.problems import problem


def test_a_small_problem_is_solved_within_its_limit():
    (row,) = times.measure(problem("tiny_02"), seeds=[0], limit_s=1.0)

    assert row.share == 1.0
    assert row.close_cpu_s is not None
    assert row.close_clock_s is not None


def test_a_run_is_close_at_its_first_plan_within_two_percent():
    run = times.Watched(problem("tiny_02"))
    run.better[:] = [(1.0, 0.1, 0.2), (7.75, 1.0, 2.0), (7.9, 3.0, 4.0), (7.96875, 5.0, 6.0)]

    assert times._row(run, 8.0) == times.Row(0.99609375, 3.0, 4.0)
    assert times._row(run, 16.0) == times.Row(0.498046875, None, None)


def test_the_limit_is_that_of_the_next_size():
    assert times.limit_of(times.hex_cluster("7b", 1, 2)) == 5.0
    assert times.limit_of(times.hex_cluster("7b", 1, 5)) == 20.0
    assert times.limit_of(times.hex_cluster("7b", 3, 12)) == 30.0
