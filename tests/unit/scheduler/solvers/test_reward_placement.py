"""Reward workers in a plan: their memory and rate, the rule for those without GPUs, the search for the others."""

import pytest

from services.scheduler.cost_model.reference import CostModel, Infeasible, Limit
from services.scheduler.planning.plan_message import document_of
from services.scheduler.planning.plan_wire import PlanTask, plan_task
from services.scheduler.planning.solve import make_plan, solve
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import Broker, GpuWorkers, PlanDocument
from services.scheduler.problem.problem import HostClass, Problem, parse_problem
from services.scheduler.service_placement.service_places import with_center
from services.scheduler.solvers.registry import SOLVERS
from tests.helpers.plans.problems import plan, problem

FEW = ("links=[]", "nodes=[{name: a100, gpu: A100-80, gpus: 6, region: r0}, {name: l4, gpu: L4, gpus: 4, region: r0}]")
SPLIT = plan([("l40s-0", 1, 8), ("l4-0", 2, 4)], [("a100-0", 8)])


def stated(reward: str | None = None, **memory_GB: float) -> Problem:
    """Machines a100-0 and l40s-0 in r0, l4-0 and l4-1 in r1; main memory by entry."""
    found = problem("tiny_04", *([] if reward is None else [f"workload.reward={reward}"]))
    nodes = tuple(node.model_copy(update={"memory_GB": memory_GB.get(node.name)}) for node in found.nodes)
    return found.model_copy(update={"nodes": nodes})


def forever():
    return 1000.0


def planned(of: Problem, solver: str = "partition"):
    solution = solve(CostModel(of), solver, time_left=forever)
    assert solution.plan is not None
    assert violations(of, solution.plan) == []
    return solution


def test_as_many_machines_have_a_reward_worker_as_keep_up_with_the_rest():
    free = planned(stated())
    rate = free.score.samples_per_second
    head = free.plan.train[0].node
    assert free.plan.reward == ()
    for workers, expected in (
        (0.9, ()),
        (1.1, (head, "l40s-0")),
        # Those of the head's region first, then those of the other one.
        (2.1, (head, "l40s-0", "l4-0")),
    ):
        found = planned(stated(f"{{seconds_per_sample: {8 * workers / rate}, at_once: 8}}"))
        assert found.plan == free.plan.model_copy(update={"reward": expected})
        assert found.score.samples_per_second == pytest.approx(rate)
    slow = planned(stated(f"{{seconds_per_sample: {10 / rate}}}"))
    assert set(slow.plan.reward) == {"a100-0", "l40s-0", "l4-0", "l4-1"}
    assert (slow.score.limit, slow.score.samples_per_second) == (Limit.REWARD, pytest.approx(0.4 * rate))
    by_type = f"{{seconds_per_sample: {{default: {0.9 / rate}, A100-80: {100 / rate}}}}}"
    assert planned(stated(by_type)).plan.reward == (head, "l40s-0")


def test_machines_without_gpus_beside_the_head_are_first_where_they_have_the_cores():
    free = planned(stated())
    rate, head = free.score.samples_per_second, free.plan.train[0].node
    home = CostModel(stated()).nodes[head].region

    def with_hosts(*hosts, workers=1.5, cores=2, memory_GB=0):
        reward = f"{{seconds_per_sample: {workers / rate}, cores: {cores}, memory_GB: {memory_GB}}}"
        entries = [HostClass(**{"region": home, **host}) for host in hosts]
        return stated(reward).model_copy(update={"hosts": tuple(entries)})

    desk, shelf = {"name": "desk", "cores": 4}, {"name": "shelf", "cores": 2}
    of = with_hosts(desk, shelf)
    found = planned(of)
    # The broker and its Redis take two cores of the first one.
    assert found.plan == free.plan.model_copy(update={"reward": ("desk-0", "shelf-0")})
    assert found.score.samples_per_second == pytest.approx(rate)
    assert with_center(of, found.plan, None, tokens_per_second=1e9).broker == Broker(node="desk-0", count=1)
    full = found.plan.model_copy(update={"broker": Broker(node="desk-0", count=2)})
    assert (
        "a worker keeps 2 cores busy beside 3 of brokers and Redis, and cores is 4" in CostModel(of).score(full).reason
    )
    assert violations(of, full) == ["reward: desk-0 has 4 cores; a worker needs 2 beside 3 more"]

    assert planned(with_hosts(desk, shelf, workers=0.9)).plan.reward == ("desk-0",)
    assert planned(with_hosts(desk, shelf, cores=3)).plan.reward == (head, "l40s-0")
    small = with_hosts({**desk, "memory_GB": 8}, {**shelf, "region": "r1"}, memory_GB=16)
    assert planned(small).plan.reward == (head, "l40s-0")
    # A run that goes on keeps those that it has, and adds none that nobody would start.
    of = with_hosts(desk, shelf, workers=2.5)
    task = PlanTask(run_id="r", problem=of, cost_model="rm1", solver="partition", keeps_trainers=True)
    running = free.plan.model_copy(update={"reward": ("shelf-0",)})
    kept = document_of(plan_task(task, time_left=forever, start=running, keeps_pool=True))
    assert kept.reward == ("shelf-0", "l4-0", "l4-1"), "the others only train"


def test_workers_stand_where_main_memory_allows():
    rate = planned(stated()).score.samples_per_second
    reward = f"{{seconds_per_sample: {0.5 / rate}, memory_GB: 64}}"
    assert planned(stated(reward, a100=32, l40s=128)).plan.reward == ("l40s-0",)
    nowhere = stated(reward, a100=32, l40s=32, l4=32)
    score = solve(CostModel(nowhere), "auto", time_left=forever).score
    assert isinstance(score, Infeasible)
    assert score.reason.startswith("reward: 1 workers need 64.0 GB, and memory_GB is 32.0 of a100-0")
    assert violations(nowhere, SPLIT) == ["reward: 1 workers on a100-0 need 64.0 GB, and it has 32.0 GB"]


def test_a_search_gives_reward_models_gpus_and_auto_is_no_worse_than_any_member():
    free = planned(problem("tiny_04", *FEW), "auto").score.samples_per_second
    reward = f"{{seconds_per_sample: {{default: {2.5 / free}, A100-80: {1 / free}}}, gpu_memory_GB: 20}}"
    of = problem("tiny_04", *FEW, f"workload.reward={reward}")
    rates = {solver: planned(of, solver) for solver in ("auto", *SOLVERS)}
    best = rates["auto"]
    assert best.score.samples_per_second >= max(each.score.samples_per_second for each in rates.values())
    assert 0.6 * free < best.score.samples_per_second <= free
    # An L4 has less memory than the reward model takes.
    assert {each.node for found in rates.values() for each in found.plan.reward_gpus} == {"a100-0"}
    assert best.plan.reward == ()

    def wrong(**changed: object) -> str:
        changed_plan = PlanDocument.model_validate({**plan([("l4-0", 2, 2)], [("a100-0", 5)]).stated(), **changed})
        assert violations(of, changed_plan)
        return CostModel(of).score(changed_plan).reason

    assert wrong() == "reward_gpus: empty, and reward workers need a GPU each"
    assert "a worker needs a GPU of 20.0 GB" in wrong(gen=[{"node": "a100-0"}], reward_gpus=[{"node": "l4-0"}])
    both = {"reward_gpus": [{"node": "a100-0"}], "reward": ["a100-0"]}
    assert wrong(**both).startswith("reward_gpus: stated, and reward as well")
    named = SPLIT.model_copy(update={"reward_gpus": (GpuWorkers(node="l4-1"),)})
    assert "name machines in reward" in CostModel(stated("{seconds_per_sample: 1}")).score(named).reason
    assert "leave it out" in CostModel(stated()).score(named).reason
    with pytest.raises(Exception, match="needs the key 'default'"):
        parse_problem(of.model_copy().model_dump_json(by_alias=True).replace('"default":', '"L4":'), source="problem")


def test_revisions_keep_reward_workers():
    rate = planned(stated()).score.samples_per_second
    for reward in (f"{{seconds_per_sample: {1.1 / rate}}}", f"{{seconds_per_sample: {1 / rate}, gpu_memory_GB: 20}}"):
        of = stated(reward)
        start = planned(of).plan
        assert start.reward or start.reward_gpus
        task = PlanTask(run_id="r", problem=of, cost_model="rm1", solver="partition", keeps_trainers=True)
        for keeps_pool in (True, False):
            revised = document_of(plan_task(task, time_left=forever, start=start, keeps_pool=keeps_pool))
            assert (revised.reward, revised.reward_gpus) == (start.reward, start.reward_gpus)
    # A further one joins where those that there are fall behind.
    behind = PlanTask(
        run_id="r",
        problem=stated(f"{{seconds_per_sample: {2.1 / rate}}}"),
        cost_model="rm1",
        solver="partition",
        keeps_trainers=True,
    )
    slow = planned(stated(f"{{seconds_per_sample: {1.1 / rate}}}")).plan
    more = document_of(plan_task(behind, time_left=forever, start=slow, keeps_pool=True)).reward
    assert more[: len(slow.reward)] == slow.reward
    assert len(more) == len(slow.reward) + 1
    # However far behind, none joins on a machine that only trains, which need not have a `penstock node`.
    model = CostModel(stated(f"{{seconds_per_sample: {100 / rate}}}"))
    running = plan([("l4-0", 2, 4)], [("a100-0", 8), ("l40s-0", 8)]).model_copy(update={"reward": ("a100-0",)})
    joined = make_plan(model, "partition", time_left=forever, running=running).plan
    assert set(joined.reward) == {"a100-0", "l4-0", "l4-1"}
    lost = start.model_copy(update={"reward": ("gone",), "reward_gpus": ()})
    moved = make_plan(CostModel(stated()), "partition", time_left=forever, running=lost).plan
    assert moved.reward == (moved.gen[0].node,)
