"""Clusters of many entries: equal ones are planned as one, and nested searches for services keep to their time."""

from itertools import count

import pytest

from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.alike_entries import with_joined_entries
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.problem import Problem
from services.scheduler.service_placement.placement_space import PlacementSpace
from services.scheduler.service_placement.services import NOTHING, with_services
from services.scheduler.service_placement.worker_placement import nothing
from services.scheduler.solvers.interface import ProblemTooLargeError
from services.scheduler.solvers.registry import AUTO
from tests.helpers.plans.drawn_services import ACTOR, CRITIC, SCORED
from tests.helpers.plans.problems import document, problem


def repeated(times: int, *, has_services: bool = False, is_unlike: bool = False) -> Problem:
    """tiny_04's machines that many times, each time under names of their own."""
    stated = document("tiny_04")
    stated["nodes"] = [
        {**node, "name": f"{node['name']}-r{index}", "nic_Gbps": node["nic_Gbps"] + index * is_unlike}
        for index in range(times)
        for node in stated["nodes"]
    ]
    if has_services:
        reward = {"seconds_per_sample": 1, "gpu_memory_GB": 10}
        stated["workload"] |= {"train_tasks": [ACTOR, SCORED, *CRITIC], "reward": reward}
    return Problem.model_validate(stated)


def test_entries_of_equal_machines_are_one_with_the_names_of_all():
    joined = with_joined_entries(repeated(3))

    once = problem("tiny_04")
    assert [(node.name, node.count) for node in joined.nodes] == [
        (f"{node.name}-r0", 3 * node.count) for node in once.nodes
    ]
    names = [node.machine(index) for node in repeated(3).nodes for index in range(node.count)]
    assert sorted(node.machine(index) for node in joined.nodes for index in range(node.count)) == sorted(names)
    assert with_joined_entries(once) is once


def test_a_plan_of_equal_entries_is_as_fast_as_one_of_their_machines_in_one_entry():
    stated = repeated(2)
    counted = problem("tiny_04")
    nodes = tuple(node.model_copy(update={"count": 2 * node.count}) for node in counted.nodes)
    counted = counted.model_copy(update={"nodes": nodes})

    found, same = (solve(CostModel(each), "partition", time_left=lambda: 1000.0) for each in (stated, counted))

    assert violations(stated, found.plan) == []
    assert CostModel(stated).score(found.plan) == found.score
    assert found.score.samples_per_second == pytest.approx(same.score.samples_per_second, rel=1e-9)


def test_placements_of_services_that_are_too_many_are_counted_not_listed(monkeypatch):
    model = CostModel(repeated(16, has_services=True, is_unlike=True))
    monkeypatch.setattr(PlacementSpace, "_options_of", None)

    with pytest.raises(ProblemTooLargeError, match="1,000,000 ways"):
        PlacementSpace(model, model, time_left=lambda: 1000.0)


def test_searches_for_places_that_find_nothing_end_soon_after_their_time():
    model = CostModel(repeated(16, has_services=True, is_unlike=True))
    seconds = count()
    num_searches = count()

    def search(rest, time_left):
        next(num_searches)
        next(seconds)
        return nothing("too late")

    found = with_services(model, search, time_left=lambda: 2.0 - next(seconds), kept=NOTHING)

    assert found.plan is None
    assert next(num_searches) < 10


def test_auto_plans_a_cluster_of_unlike_machines_with_all_services():
    left = iter([60.0 - 0.02 * index for index in range(100_000)])
    stated = repeated(4, has_services=True, is_unlike=True)

    found = solve(CostModel(stated), AUTO, time_left=lambda: next(left, -1.0))

    assert violations(stated, found.plan) == []
