"""A plan in force follows the machines that are there and the lengths that are seen."""

import json

import pytest
from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from penstock.errors import InvalidFieldError
from penstock.rpc import call
from penstock.v1 import scheduler_pb2 as pb
from penstock.v1 import scheduler_pb2_grpc
from services.scheduler import service as scheduler_service
from services.scheduler.config import LengthsConfig
from services.scheduler.cost_model.rm1 import Rm1
from services.scheduler.live_plans import MIN_LENGTHS, document_of
from services.scheduler.revision import COOL_DOWN_S
from services.scheduler.server import make_forecaster, make_service
from services.scheduler.service import SchedulerServicer
from tests.helpers.planning import document, problem
from tests.helpers.serving import channel_to

KINDS = {"h20-0": "H20", "h800-0": "H800"}


class Fleet:
    """A scheduler with the machines of tiny_02, each alive as long as it reports."""

    def __init__(self, channel, servicer, clock):
        self._channel, self.servicer, self.clock = channel, servicer, clock
        self.alive = dict.fromkeys(KINDS, 0.0)

    async def ask(self, method, request):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        return await call(getattr(stub, method), request, peer="scheduler")

    async def join(self, name, kind):
        node = pb.Node(node_id=name, accelerators=[pb.Accelerator(kind=kind, count=8)])
        await self.ask("RegisterNode", pb.RegisterNodeRequest(node=node))
        self.alive[name] = 0.0

    async def pass_time(self, seconds, *, rates=None):
        """Everybody alive reports; then plans are looked at."""
        self.clock.advance(seconds)
        for name in self.alive:
            rate = (rates or {}).get(name, 0.0)
            told = [pb.MeasuredRate(role=pb.ROLE_GENERATOR, tokens_per_second=rate)] if rate else []
            await self.ask("ReportNode", pb.ReportNodeRequest(node_id=name, rates=told))
        await self.servicer.revise()
        return (await self.ask("GetPlan", pb.GetPlanRequest(run_id="r"))).plan


@pytest.fixture
async def fleet():
    clock = ManualClock()
    lengths = make_forecaster(LengthsConfig(), clock=clock, registry=CollectorRegistry())
    servicer = SchedulerServicer(clock=clock, heartbeat_interval_s=5.0, lengths=lengths)
    async with channel_to(make_service(servicer)) as channel:
        fleet = Fleet(channel, servicer, clock)
        for name, kind in KINDS.items():
            await fleet.join(name, kind)
        request = pb.CreatePlanRequest(run_id="r", problem_json=json.dumps(document("tiny_02")))
        await fleet.ask("CreatePlan", request)
        yield fleet
        await lengths.close()


def machines(plan):
    return {each.node_id for each in plan.assignments}


def trainers(plan):
    return {each.node_id: len(each.accelerator_indices) for each in plan.assignments if each.role == pb.ROLE_TRAINER}


async def test_nothing_changes_while_nothing_changed(fleet):
    plan = await fleet.pass_time(2 * COOL_DOWN_S)

    assert plan.revision == 1


async def test_a_machine_that_joins_is_used_once_the_plan_has_rested(fleet):
    await fleet.join("h20-new", "H20")
    early = await fleet.pass_time(COOL_DOWN_S / 2)
    later = await fleet.pass_time(COOL_DOWN_S)

    assert (early.revision, later.revision) == (1, 2)
    assert "h20-new" in machines(later)
    assert later.expected_tokens_per_second > 1.05 * early.expected_tokens_per_second
    assert "faster; the change stops" in later.explanation


async def test_a_machine_that_falls_silent_is_replaced_and_used_again_when_it_is_back(fleet):
    await fleet.join("h20-new", "H20")
    await fleet.pass_time(2 * COOL_DOWN_S)
    del fleet.alive["h20-new"]
    without = await fleet.pass_time(2 * COOL_DOWN_S)
    await fleet.join("h20-new", "H20")
    again = await fleet.pass_time(2 * COOL_DOWN_S)

    assert "h20-new" not in machines(without)
    assert "h20-new" in machines(again)


async def test_a_plan_that_cannot_run_any_more_is_replaced_at_once(fleet):
    await fleet.join("h800-new", "H800")
    del fleet.alive["h800-0"]
    plan = await fleet.pass_time(20.0)

    assert plan.revision == 2
    assert machines(plan) == {"h20-0", "h800-new"}
    assert "h800-0 of the plan in force: not there any more" in plan.explanation


async def test_a_machine_that_says_it_leaves_is_left_out(fleet):
    await fleet.join("h20-new", "H20")
    await fleet.pass_time(2 * COOL_DOWN_S)
    await fleet.ask("ReportNode", pb.ReportNodeRequest(node_id="h20-new", is_leaving=True))
    del fleet.alive["h20-new"]
    plan = await fleet.pass_time(2 * COOL_DOWN_S)

    assert machines(plan) == set(KINDS)


async def test_lengths_that_grow_are_planned_for(fleet):
    stated = Rm1(problem("tiny_02")).demand.completion_tokens
    seen = [pb.LengthObservation(query=pb.LengthQuery(group_id="g"), num_completion_tokens=int(2 * stated))]

    await fleet.ask("ReportLengths", pb.ReportLengthsRequest(run_id="r", observations=seen * (MIN_LENGTHS - 1)))
    before = await fleet.pass_time(2 * COOL_DOWN_S)
    assert fleet.servicer._live._runs["r"].looked_at == problem("tiny_02")

    await fleet.ask("ReportLengths", pb.ReportLengthsRequest(run_id="r", observations=seen))
    await fleet.pass_time(2 * COOL_DOWN_S)

    assert before.revision == 1
    looked_at = fleet.servicer._live._runs["r"].looked_at
    assert Rm1(looked_at).demand.completion_tokens > 1.5 * stated


async def test_a_machine_that_slows_is_planned_for_as_a_slower_one(fleet):
    for index in (1, 2):
        await fleet.join(f"h20-extra{index}", "H20")
    fast = await fleet.pass_time(2 * COOL_DOWN_S)
    rates = {"h20-0": 100.0, "h20-extra1": 1000.0, "h20-extra2": 1000.0}
    slow = await fleet.pass_time(2 * COOL_DOWN_S, rates=rates)

    looked_at = fleet.servicer._live._runs["r"].looked_at
    assert "H20 at 10%" in looked_at.gpu_types
    assert slow.revision >= fast.revision


def going_on():
    """Asks for a run that trains on the H800s and generates on the H20s, in replicas that are far too large."""
    request = pb.CreatePlanRequest(run_id="r", problem_json=json.dumps(document("tiny_02")), keeps_trainers=True)
    assign = request.running_plan.assignments.add
    assign(node_id="h800-0", role=pb.ROLE_TRAINER, accelerator_indices=range(8))
    assign(node_id="h20-0", role=pb.ROLE_GENERATOR, tensor_parallel=4, num_replicas=2)
    return request


async def test_a_scheduler_that_forgot_plans_better_generators_and_leaves_the_trainers(fleet):
    plan = (await fleet.ask("CreatePlan", going_on())).plan

    assert trainers(plan) == {"h800-0": 8}
    (generator,) = [each for each in plan.assignments if each.role == pb.ROLE_GENERATOR]
    assert (generator.node_id, generator.tensor_parallel, generator.num_replicas) == ("h20-0", 1, 8)
    assert generator.num_concurrent_samples > 0


async def test_trainers_that_are_kept_stay_while_generators_are_replaced(fleet):
    await fleet.ask("CreatePlan", going_on())
    await fleet.join("h20-new", "H20")
    del fleet.alive["h20-0"]
    after = await fleet.pass_time(20.0)

    assert trainers(after) == {"h800-0": 8}
    assert machines(after) == {"h800-0", "h20-new"}
    assert "h20-0 of the plan in force: not there any more. h20-new now used" in after.explanation


async def test_a_scheduler_that_forgot_takes_machines_in_again_at_once(fleet):
    await fleet.ask("CreatePlan", going_on())
    await fleet.join("h20-new", "H20")
    plan = await fleet.pass_time(1.0)

    assert "h20-new" in machines(plan)


async def test_a_plan_that_is_asked_for_again_begins_with_the_one_in_force(fleet, monkeypatch):
    before = (await fleet.ask("GetPlan", pb.GetPlanRequest(run_id="r"))).plan
    begins = []

    def note(problem, *, run_id, starts, **_):
        begins.extend(starts)
        return pb.Plan(run_id=run_id)

    monkeypatch.setattr(scheduler_service, "plan_problem", note)
    await fleet.ask("CreatePlan", pb.CreatePlanRequest(run_id="r", problem_json=json.dumps(document("tiny_02"))))

    assert begins == [document_of(before)]


async def test_a_running_plan_that_is_none_is_refused(fleet):
    request = pb.CreatePlanRequest(run_id="r", problem_json=json.dumps(document("tiny_02")))
    request.running_plan.assignments.add(node_id="h800-0", role=pb.ROLE_GENERATOR, tensor_parallel=100_000)
    with pytest.raises(InvalidFieldError, match="running_plan: is no plan"):
        await fleet.ask("CreatePlan", request)
