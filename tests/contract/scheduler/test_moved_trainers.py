"""Revisions move a run's trainer where that pays, and only to machines that can take it."""

import json

import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.replanning import replan_rule, trainer_move
from tests.helpers.plans.planned_fleet import COOL_DOWN_S, KINDS, planned_fleet
from tests.helpers.plans.problems import document

pytestmark = pytest.mark.timeout(240)

GENERATES, TRAINS = pb.ROLE_GENERATOR, pb.ROLE_TRAINER


@pytest.fixture
async def fleet():
    """The run trains on the H800s and generates on the H20s; both may change."""
    async with planned_fleet(registered=KINDS) as fleet:
        request = pb.CreatePlanRequest(run_id="r", problem_json=json.dumps(document("tiny_02")))
        assign = request.running_plan.assignments.add
        assign(node_id="h800-0", role=TRAINS, accelerator_indices=range(8))
        assign(node_id="h20-0", role=GENERATES, tensor_parallel=1, num_replicas=8)
        plan = (await fleet.ask("CreatePlan", request)).plan
        assert trainers(plan) == {"h800-0": 8}, "what runs is only left for a gain that is worth it"
        yield fleet


def trainers(plan):
    return {each.node_id: len(each.accelerator_indices) for each in plan.assignments if each.role == TRAINS}


async def test_the_trainer_moves_where_that_pays_and_the_revision_says_what_it_costs(fleet):
    await fleet.join("h800-new", "H800", roles=[GENERATES, TRAINS])
    plan = await fleet.pass_time(2 * COOL_DOWN_S)

    assert trainers(plan) != {"h800-0": 8}
    assert "faster; the change moves the trainer, which stops everything for 61 s" in plan.explanation


async def test_a_move_costs_what_the_last_one_took(fleet):
    with pytest.raises(InvalidFieldError, match="trainer_move_s"):
        await fleet.ask("ReportNode", pb.ReportNodeRequest(node_id="h20-0", trainer_move_s=-1.0))
    await fleet.ask("ReportNode", pb.ReportNodeRequest(node_id="h20-0", trainer_move_s=123.0))
    await fleet.join("h800-new", "H800", roles=[GENERATES, TRAINS])
    plan = await fleet.pass_time(2 * COOL_DOWN_S)

    assert "faster; the change moves the trainer, which stops everything for 123 s" in plan.explanation


async def test_a_move_that_does_not_pay_leaves_the_trainer_and_revises_generators(fleet, monkeypatch):
    monkeypatch.setattr(trainer_move, "START_S", 0.9 * replan_rule.HORIZON_S)
    await fleet.join("h800-new", "H800", roles=[GENERATES, TRAINS])
    plan = await fleet.pass_time(2 * COOL_DOWN_S)

    assert trainers(plan) == {"h800-0": 8}
    assert "h800-new now used" in plan.explanation
    assert "faster; the change stops" in plan.explanation


async def test_the_trainer_moves_only_to_machines_that_say_they_train(fleet):
    await fleet.join("h800-new", "H800", roles=[GENERATES])
    kept = await fleet.pass_time(2 * COOL_DOWN_S)
    assert "h800-new" not in trainers(kept)

    await fleet.ask("ReportNode", pb.ReportNodeRequest(node_id="h800-0", is_leaving=True))
    del fleet.alive["h800-0"]
    elsewhere = await fleet.pass_time(1.0)
    assert set(trainers(elsewhere)) == {"h20-0"}, "it cannot go to the machine that would be best"

    await fleet.join("h800-new", "H800", roles=[GENERATES, TRAINS])
    assert "h800-new" in trainers(await fleet.pass_time(2 * COOL_DOWN_S))
    assert "h800-0 of the plan in force: not there any more; the change moves the trainer" in elsewhere.explanation
