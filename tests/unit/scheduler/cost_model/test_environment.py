"""Sessions that wait for an environment: which slots they take, and what staleness leaves for the others."""

import pytest

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.reference import CostModel, Score
from services.scheduler.cost_model.replica import ReplicaModel
from services.scheduler.problem.workload import EnvironmentWork
from services.scheduler.replanning.environment_wait import environment_wait_s, with_environment_wait
from tests.helpers.plans.problems import plan, problem

PLAN = plan([("h20-0", 1, 8)], [("h800-0", 8)])
STALE = "workload.staleness=1000"


def waiting(seconds, max_waiting=100_000, *changes):
    return problem("tiny_02", f"workload.environment={{wait_s: {seconds}, max_waiting: {max_waiting}}}", *changes)


def replica(stated):
    node = next(node for node in stated.nodes if node.gpu == "H20")
    return ReplicaModel(stated, demand_of(stated), node, 1)


def test_sessions_wait_beside_the_slots_as_far_as_the_limit_lets_them():
    alone = replica(problem("tiny_02")).at(64)
    free = replica(waiting(60)).at(64)
    assert (free.samples_per_second, free.decoding, free.batch) == (alone.samples_per_second, 64, 64)
    none = replica(waiting(60, 0))
    held = none.at(64)
    # Every slot is held while its session waits: Little's law.
    assert held.decoding + held.samples_per_second * 60 == pytest.approx(64)
    assert held.samples_per_second == pytest.approx(none.samples_per_second(held.decoding))
    some = replica(waiting(60, 8)).at(64)
    assert held.samples_per_second < some.samples_per_second < alone.samples_per_second
    assert replica(waiting(0, 0)).at(64).samples_per_second == alone.samples_per_second


def test_sessions_that_wait_are_under_way_and_count_against_staleness():
    fresh, stale = (CostModel(waiting(600, 100_000, *changes)).score(PLAN) for changes in ((), (STALE,)))
    alone = CostModel(problem("tiny_02")).score(PLAN)
    assert isinstance(fresh, Score)
    assert fresh.samples_per_second < alone.samples_per_second
    under_way = sum(
        each.replicas.count * (each.state.decoding + each.state.samples_per_second * 600) for each in fresh.generation
    )
    workload = problem("tiny_02").workload
    most = (workload.staleness + 1) * workload.prompts_per_step * workload.group_size
    assert under_way == pytest.approx(most, rel=0.05)
    assert under_way <= most
    assert stale.samples_per_second == pytest.approx(
        CostModel(problem("tiny_02", STALE)).score(PLAN).samples_per_second
    )


def test_a_measured_wait_replaces_the_stated_one_where_it_differs():
    def views(*seconds):
        rates = [pb.MeasuredRate(role=pb.ROLE_GENERATOR, environment_wait_s=each) for each in seconds]
        return [pb.NodeView(is_alive=True, rates=[rate, pb.MeasuredRate(role=pb.ROLE_GENERATOR)]) for rate in rates]

    stated = waiting(10, 3)
    assert environment_wait_s(stated, views(), before=None) is None
    assert environment_wait_s(stated, views(10.9), before=None) is None
    found = environment_wait_s(stated, views(5, 21, 400), before=None)
    assert found == 21.0
    assert environment_wait_s(stated, views(20.0), before=found) == 21.0
    assert with_environment_wait(stated, 21.0).workload.environment == EnvironmentWork(wait_s=21.0, max_waiting=3)
    unstated = problem("tiny_02")
    assert with_environment_wait(unstated, environment_wait_s(unstated, views(2), before=None)) == problem(
        "tiny_02", "workload.environment={wait_s: 2}"
    )
