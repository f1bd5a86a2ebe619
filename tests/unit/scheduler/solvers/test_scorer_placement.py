"""Scorers in a plan: memory, rate, and the GPUs that a search gives them."""

import itertools

import pytest

from services.scheduler.cost_model.reference import CostModel, Infeasible, Limit
from services.scheduler.planning.plan_message import document_of
from services.scheduler.planning.plan_wire import PlanTask, plan_task
from services.scheduler.planning.solve import make_plan, solve
from services.scheduler.problem.plan_check import violations
from services.scheduler.problem.plan_document import GpuWorkers, PlanDocument
from tests.helpers.plans.problems import plan, problem

TASKS = "workload.train_tasks=[{name: actor, kind: train}, {name: reference, kind: infer, is_service: true}]"
POOLED = "workload.train_tasks=[{name: actor, kind: train}, {name: reference, kind: infer}]"
NODES = "nodes=[{name: a100, gpu: A100-80, gpus: 8, region: r0}, {name: l4, gpu: L4, gpus: 4, count: 2, region: r0}]"
PACKED = ("links=[]", NODES, "model.ffn=12288", "cost_model.train_pack_tokens=8192")


def forever():
    return 2.0


@pytest.fixture(scope="module")
def model() -> CostModel:
    return CostModel(problem("tiny_04", TASKS, *PACKED))


def test_scorers_take_the_frozen_model_and_its_work_from_the_pool(model):
    pooled = CostModel(problem("tiny_04", POOLED, *PACKED))

    assert pooled.demand.training_state_bytes - model.demand.training_state_bytes == 2 * model.problem.model.params
    assert dict(pooled.demand.task_flops)["infer"] == model.demand.scored_flops
    document = plan([("l4-0", 2, 2)], [("a100-0", 8)])
    assert "score: empty, so nothing computes reference" in model.score(document).reason
    assert violations(model.problem, document) == ["score: 0 machines, and the workload has a task for them"]
    with_scorer = document.model_copy(update={"score": (GpuWorkers(node="l4-1"),)})
    assert violations(model.problem, with_scorer) == []
    # One L4 computes a forward pass of 8B parameters more slowly than eight A100 train them.
    assert model.score(with_scorer).limit is Limit.SCORING
    assert model.score(with_scorer).samples_per_second == model.gpu_scoring_rate["l4"]
    assert "leave it out" in pooled.score(with_scorer).reason


def test_a_gpu_without_memory_for_the_frozen_model_and_a_pass_is_refused():
    stated = problem("tiny_04", TASKS, *PACKED, "cost_model.train_pack_tokens=200000")
    document = plan([("l4-0", 2, 2)], [("a100-0", 8)]).model_copy(update={"score": (GpuWorkers(node="l4-1"),)})

    found = [each for each in violations(stated, document) if each.startswith("score")]
    assert "score.0.node: a scorer needs" in found[0]
    assert isinstance(CostModel(stated).score(document), Infeasible)


def test_the_search_gives_scorers_what_is_best(model):
    report = make_plan(model, "auto", time_left=lambda: 6.0)
    found = report.solution.plan
    best = 0.0
    # Of all: scorers on any GPUs of one entry, the rest by exhaustive search.
    for entry, trained, count in itertools.product(("a100-0", "l4-1"), range(1, 9), range(1, 5)):
        for tp in (1, 2, 4):
            gen = [("l4-0", tp, 4 // tp)]
            document = plan(gen, [("a100-0", trained)]).model_copy(
                update={"score": (GpuWorkers(node=entry, gpus=count),)}
            )
            best = max(best, model.score(document).samples_per_second)

    assert violations(model.problem, found) == []
    assert found.score
    assert report.solution.score.samples_per_second >= 0.995 * best > 0


def test_a_revision_keeps_scorers_and_reward_workers_and_the_wire_carries_them(model):
    start = solve(model, "partition", time_left=forever).plan.model_copy(update={"reward": ("l4-0",)})
    task = PlanTask(run_id="r", problem=model.problem, cost_model="rm1", solver="partition", keeps_trainers=True)
    message = plan_task(task, time_left=forever, start=start, keeps_pool=True)
    revised = document_of(message)

    assert (revised.score, revised.reward, revised.train) == (start.score, ("l4-0",), start.train)
    used = [(each.node_id, index) for each in message.assignments for index in each.accelerator_indices]
    assert len(used) == len(set(used)), "no GPU has two parts"
    lost = start.model_copy(update={"reward": ("gone",)})
    moved = document_of(plan_task(task, time_left=forever, start=lost, keeps_pool=True))
    assert moved.reward == (moved.gen[0].node,)


def test_a_plan_names_what_is_wrong_with_its_services(model):
    good = plan([("l4-0", 2, 2)], [("a100-0", 8)]).model_copy(update={"score": (GpuWorkers(node="l4-1"),)})

    def reason(**changed):
        return model.score(PlanDocument.model_validate({**good.stated(), **changed})).reason

    assert reason(reward=["l4-9"]) == "reward.0: there is no machine 'l4-9'"
    assert "reward.1: 'l4-0' is listed twice" in reason(reward=["l4-0", "l4-0"])
    assert reason(score=[{"node": "l4-1", "gpus": 5}]) == "machine l4-1 has 4 GPUs, and the plan uses 5"
