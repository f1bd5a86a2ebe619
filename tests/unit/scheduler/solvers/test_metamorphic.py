"""Laws that need no reference: what may never make the best plan slower, and what may change nothing."""

import copy

import pytest

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.solve import solve
from services.scheduler.problem.problem import Problem
from tests.helpers.plans.drawn_problems import drawn
from tests.helpers.plans.problems import problem

PROBLEMS = [problem("tiny_02"), *(drawn(seed) for seed in (0, 2, 4))]


def best(stated: dict) -> float:
    solution = solve(CostModel(Problem.model_validate(stated)), "auto", time_left=lambda: 1000.0)
    assert solution.is_optimal
    return solution.score.samples_per_second


def more_machines(stated):
    stated["nodes"][0]["count"] += 1


def faster_links(stated):
    for link in stated["links"]:
        link["bw_Gbps"] *= 2


def faster_nics(stated):
    for node in stated["nodes"]:
        node["nic_Gbps"] *= 2


def more_staleness(stated):
    stated["workload"]["staleness"] += 1


def more_memory(stated):
    for gpu in stated["gpu_types"].values():
        gpu["hbm_GB"] *= 1.5


def other_names(stated):
    for index, node in enumerate(stated["nodes"]):
        node["name"] = f"machine{9 - index}"


def other_order(stated):
    stated["nodes"].reverse()


@pytest.mark.parametrize("stated", PROBLEMS, ids=range(len(PROBLEMS)))
@pytest.mark.parametrize("change", [more_machines, faster_links, faster_nics, more_staleness])
def test_more_of_anything_never_lowers_the_throughput(stated, change):
    before = stated.model_dump(mode="json", by_alias=True)
    after = copy.deepcopy(before)
    change(after)

    assert best(after) >= best(before) * (1 - 1e-9)


@pytest.mark.parametrize("stated", PROBLEMS, ids=range(len(PROBLEMS)))
def test_more_memory_lowers_it_by_no_more_than_batches_are_rounded(stated):
    # Where staleness bounds the samples under way, RM-1 shrinks all batches by one share, so that with more memory slow
    # GPUs can get a larger part of them.
    before = stated.model_dump(mode="json", by_alias=True)
    after = copy.deepcopy(before)
    more_memory(after)

    assert best(after) >= best(before) * (1 - 0.005)


@pytest.mark.parametrize("stated", PROBLEMS, ids=range(len(PROBLEMS)))
@pytest.mark.parametrize("change", [other_names, other_order])
def test_names_and_order_change_nothing(stated, change):
    before = stated.model_dump(mode="json", by_alias=True)
    after = copy.deepcopy(before)
    change(after)

    assert best(after) == pytest.approx(best(before), rel=1e-9)
