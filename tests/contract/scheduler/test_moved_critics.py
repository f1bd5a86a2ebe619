"""Revisions move a run's critic, scorers and reward workers, each to machines that can take it."""

import json

import pytest

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.plan_message import document_of
from services.scheduler.problem.plan_document import CriticPlace
from tests.helpers.plans.planned_fleet import COOL_DOWN_S, KINDS, planned_fleet
from tests.helpers.plans.problems import document, problem

pytestmark = pytest.mark.timeout(240)

TASKS = (
    "workload.train_tasks=[{name: actor, kind: train}, {name: reference, kind: infer, is_service: true}, {name: critic,"
    " kind: infer, shares_weights: true, is_service: true}, {name: critic_train, kind: train, is_service: true}]"
)
REFERENCE = "workload.train_tasks=[{name: actor, kind: train}, {name: reference, kind: infer, is_service: true}]"
REWARD = "workload.reward={seconds_per_sample: 0.01}"
MOVES = [pb.ROLE_GENERATOR, pb.ROLE_CRITIC]


@pytest.fixture
async def fleet():
    """The run trains on the H800s; the H20s generate, and have critic, scorers and a reward worker."""
    async with planned_fleet(registered=KINDS) as fleet:
        stated = json.dumps(document("tiny_02", TASKS, REWARD))
        request = pb.CreatePlanRequest(run_id="r", problem_json=stated, keeps_trainers=True)
        assign = request.running_plan.assignments.add
        assign(node_id="h800-0", role=pb.ROLE_TRAINER, accelerator_indices=range(8))
        assign(node_id="h20-0", role=pb.ROLE_GENERATOR, tensor_parallel=1, num_replicas=2)
        assign(node_id="h20-0", role=pb.ROLE_CRITIC, accelerator_indices=range(2, 6))
        assign(node_id="h20-0", role=pb.ROLE_SCORER, accelerator_indices=range(6, 8))
        assign(node_id="h20-0", role=pb.ROLE_REWARD)
        plan = document_of((await fleet.ask("CreatePlan", request)).plan)
        assert plan.critic == CriticPlace(node="h20-0", gpus=4)
        assert [each.node for each in plan.score] == list(plan.reward) == ["h20-0"]
        yield fleet


def computed(role, rate):
    return pb.MeasuredRate(role=role, tokens_per_second=rate, run_id="r")


async def leave(fleet, name):
    await fleet.ask("ReportNode", pb.ReportNodeRequest(node_id=name, is_leaving=True))
    del fleet.alive[name]


async def test_what_was_on_a_machine_that_leaves_goes_on_elsewhere_at_once(fleet):
    await fleet.join("h20-other", "H20", roles=[pb.ROLE_GENERATOR])
    await fleet.join("h20-new", "H20", roles=MOVES)
    await leave(fleet, "h20-0")
    revised = await fleet.pass_time(1.0)
    plan = document_of(revised)

    assert plan.critic.node == "h20-new", "the other one could not go on from the critic's state"
    assert plan.score
    assert plan.reward
    assert "h20-0" not in {node for _, node, _ in plan.places()}
    assert [share.node for share in plan.train] == ["h800-0"]
    assert "h20-0 of the plan in force: not there any more; the change moves the critic, which" in revised.explanation


async def test_without_a_machine_that_can_go_on_the_plan_waits_for_the_critics_own(fleet):
    await fleet.join("h20-other", "H20", roles=[pb.ROLE_GENERATOR])
    await leave(fleet, "h20-0")
    assert document_of(await fleet.pass_time(COOL_DOWN_S)).critic.node == "h20-0"

    await fleet.join("h20-0", "H20", roles=MOVES)
    assert document_of(await fleet.pass_time(COOL_DOWN_S)).critic.node == "h20-0"


async def test_a_critic_moves_where_that_pays(fleet):
    await fleet.join("h800-new", "H800", roles=MOVES)
    revised = await fleet.pass_time(2 * COOL_DOWN_S)

    assert document_of(revised).critic.node == "h800-new"
    assert "faster; the change moves the critic, which stops everything for 6" in revised.explanation


async def test_scorers_that_are_slower_than_planned_are_given_other_gpus():
    async with planned_fleet(registered=KINDS) as fleet:
        stated = json.dumps(document("tiny_02", REFERENCE))
        request = pb.CreatePlanRequest(run_id="r", problem_json=stated, keeps_trainers=True)
        before = document_of((await fleet.ask("CreatePlan", request)).plan)
        assert [each.node for each in before.score] == ["h800-0"]
        model = CostModel(problem("tiny_02", REFERENCE))
        expected = model.gpu_scoring_rate["h800"] * model.demand.trained_tokens

        as_planned = {"h800-0": computed(pb.ROLE_SCORER, expected)}
        assert document_of(await fleet.pass_time(2 * COOL_DOWN_S, rates=as_planned)) == before
        slower = {"h800-0": computed(pb.ROLE_SCORER, expected / 10)}
        revised = await fleet.pass_time(2 * COOL_DOWN_S, rates=slower)
        assert [each.node for each in document_of(revised).score] == ["h20-0"]
        assert f"A scorer computes {float(f'{expected / 10:.2g}'):g} tokens/s on H800." in revised.explanation
