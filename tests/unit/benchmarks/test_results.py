"""The comparisons with the papers: what counts as shown, and that a search knows its bounds."""

from xml.etree import ElementTree

import pytest

from benchmarks.scheduler import results
from benchmarks.scheduler.best import best_plan, whole_types
from benchmarks.scheduler.comparisons import Comparison
from benchmarks.scheduler.problems.settings import GRPO_TASKS, lognormal, machines, make_problem
from simulator.virtual_run.build_run import Mode
from simulator.virtual_run.simulation import Options


@pytest.mark.parametrize(
    ("ours", "wanted", "is_shown"),
    [(1.2, (1.1, None), True), (1.0, (1.1, None), False), (1.7, (1.3, 1.6), False), (1.5, (1.3, 1.6), True)],
)
def test_a_row_is_shown_within_its_band(ours, wanted, is_shown):
    assert Comparison("row", "paper", wanted, ours, "how").is_shown is is_shown


def test_two_groups_are_of_whole_types():
    nodes = make(h800=2, h20=3).nodes

    assert [whole_types(nodes, training) for training in ((2, 0), (0, 3), (1, 0), (2, 1))] == [True, True, False, False]
    split = [
        nodes[0].model_copy(update={"name": "a", "count": 1}),
        nodes[0].model_copy(update={"name": "b", "count": 1}),
    ]
    assert not whole_types(split, (1, 0))


def test_the_best_of_all_plans_is_not_worse_than_the_best_of_some():
    problem, options = make(h800=1, h20=1), Options(mode=Mode.ONE_STEP)

    free = best_plan(problem, options)
    whole = best_plan(problem, options, allowed=whole_types)

    assert free.samples_per_second >= whole.samples_per_second > 0
    assert "8 H800 train" in whole.shown
    assert "8 H20 generate" in whole.shown


def test_the_staleness_table_and_its_picture_hold_every_bound():
    ours = dict.fromkeys(results.AREAL_PAPER, 300e3) | {0: 150e3}

    table, picture = results._staleness_table(ours), results._bars(ours)

    assert "| 0 | 129 (1.00) | 150 (1.00) |" in table
    assert "2.00 times, 0%. Shown: yes." in table
    drawn = ElementTree.fromstring(picture)
    assert sum(each.tag.endswith("rect") for each in drawn.iter()) == 2 * len(ours) + 2


def make(*, h800: int, h20: int):
    workload = {
        "prompts_per_step": 32,
        "group_size": 4,
        "prompt_len": 200,
        "output_len": lognormal(600, 0.6, 4000),
        "staleness": 1,
        "train_tasks": GRPO_TASKS,
    }
    return make_problem("small", [machines("H800", h800), machines("H20", h20)], "qwen2.5-1.5b", workload=workload)
