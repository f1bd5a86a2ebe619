"""A plan in force follows the machines that are there and the lengths that are seen."""

import json

import pytest

from penstock.errors import InvalidFieldError
from penstock.tracing.recorder import MAX_TEXT_CHARACTERS
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler import service as scheduler_service
from services.scheduler.cost_model.calibrated import CALIBRATED, make_model
from services.scheduler.cost_model.demand import demand_of
from services.scheduler.cost_model.network import Network
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.cost_model.replica import ReplicaModel
from services.scheduler.cost_model.training_step import training_step
from services.scheduler.planning.plan_message import document_of
from services.scheduler.problem.plan_document import PlanDocument, node_classes
from services.scheduler.problem.problem import Problem
from services.scheduler.replanning.replanner import GRACE_INTERVALS, MIN_LENGTHS
from tests.helpers.plans.planned_fleet import COOL_DOWN_S, INTERVAL_S, KINDS, planned_fleet
from tests.helpers.plans.problems import document, problem
from tests.helpers.traces import spans_in, tracing_to

# A search takes a second; on a machine with much else to do it takes many.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
async def fleet():
    async with planned_fleet(registered=KINDS) as fleet:
        yield fleet


@pytest.fixture
async def unregistered():
    async with planned_fleet(registered=()) as fleet:
        yield fleet


def machines(plan):
    return {each.node_id for each in plan.assignments}


def trainers(plan):
    return {each.node_id: len(each.accelerator_indices) for each in plan.assignments if each.role == pb.ROLE_TRAINER}


async def test_nothing_changes_while_nothing_changed(fleet):
    plan = await fleet.pass_time(2 * COOL_DOWN_S)

    assert plan.revision == 1


async def test_a_machine_that_joins_is_used_once_the_plan_has_rested(fleet, tmp_path):
    with tracing_to(tmp_path, ratio=0.0):
        await fleet.join("h20-new", "H20")
        early = await fleet.pass_time(COOL_DOWN_S / 2)
        later = await fleet.pass_time(COOL_DOWN_S)

    assert (early.revision, later.revision) == (1, 2)
    assert "h20-new" in machines(later)
    assert later.expected_tokens_per_second > 1.05 * early.expected_tokens_per_second
    assert "faster; the change moves the trainer, which stops everything for" in later.explanation
    revised = [span.attributes for span in spans_in(tmp_path) if "rl.plan.explanation" in span.attributes]
    assert [each["rl.plan.explanation"] for each in revised] == [later.explanation[:MAX_TEXT_CHARACTERS]]
    assert {span.name for span in spans_in(tmp_path)} == {"rl.plan.revise"}


async def test_a_revision_costs_what_machines_measured_that_a_generator_takes_to_start(fleet):
    await fleet.ask("ReportNode", pb.ReportNodeRequest(node_id="h20-0", generator_start_s=97.0))
    await fleet.join("h20-new", "H20")
    del fleet.alive["h20-0"]
    await fleet.ask("ReportNode", pb.ReportNodeRequest(node_id="h20-new", generator_start_s=57.0))
    plan = await fleet.pass_time(20.0)

    assert "the change moves the trainer, which stops everything for 58 s" in plan.explanation


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


async def see_lengths(fleet, growth, num_samples=MIN_LENGTHS):
    """Completions that are so many times as long as the problem says."""
    tokens = round(growth * CostModel(problem("tiny_02")).demand.completion_tokens)
    seen = pb.LengthObservation(query=pb.LengthQuery(group_id="g"), num_completion_tokens=tokens)
    await fleet.ask("ReportLengths", pb.ReportLengthsRequest(run_id="r", observations=[seen] * num_samples))


def num_generating(plan):
    return sum(len(each.accelerator_indices) for each in plan.assignments if each.role == pb.ROLE_GENERATOR)


async def test_lengths_that_grow_are_generated_by_more_gpus_once_enough_were_seen(fleet):
    await see_lengths(fleet, 8, MIN_LENGTHS - 1)
    before = await fleet.pass_time(2 * COOL_DOWN_S)
    await see_lengths(fleet, 8, 1)
    after = await fleet.pass_time(1.0)

    assert (before.revision, after.revision) == (1, 2)
    assert num_generating(after) > num_generating(before)
    assert "faster; the change moves the trainer" in after.explanation


async def test_lengths_that_differ_a_little_change_nothing(fleet):
    await see_lengths(fleet, 1.1)
    assert (await fleet.pass_time(2 * COOL_DOWN_S)).revision == 1
    assert fleet.servicer._replanner._runs["r"].looked_at == problem("tiny_02")


async def test_generators_unneeded_for_shorter_lengths_are_given_up_after_the_cool_down(fleet):
    await fleet.join("h20-new", "H20")
    await fleet.ask("CreatePlan", going_on())
    many = await fleet.pass_time(2 * COOL_DOWN_S)
    assert num_generating(many) == 16

    await see_lengths(fleet, 0.1)
    few = await fleet.pass_time(2 * COOL_DOWN_S)
    assert num_generating(few) < 16
    assert "GPUs fewer are as fast" in few.explanation

    await see_lengths(fleet, 8, 2048)
    assert num_generating(await fleet.pass_time(COOL_DOWN_S / 2)) == num_generating(few)
    assert num_generating(await fleet.pass_time(COOL_DOWN_S)) == 16


def measured(times_slower, *, tp=1, batch=64):
    """What a machine of H20s reports that decodes so many times slower than the cost model expects."""
    stated = problem("tiny_02")
    model = ReplicaModel(stated, demand_of(stated), node_classes(stated)["h20-0"], tp)
    return pb.MeasuredRate(
        role=pb.ROLE_GENERATOR,
        tokens_per_second=batch / model.token_s(batch) / times_slower,
        token_s=model.token_s(batch) * times_slower,
        num_concurrent_samples=batch,
        tensor_parallel=tp,
    )


async def test_revisions_keep_the_cost_model_of_the_scheduler():
    async with planned_fleet(registered=KINDS, cost_model=CALIBRATED) as fleet:
        await fleet.join("h20-new", "H20")
        revised = await fleet.pass_time(2 * COOL_DOWN_S)
        await fleet.pass_time(2 * COOL_DOWN_S, rates={"h20-0": measured(20.0)})
        constants = fleet.servicer._replanner._runs["r"].looked_at.cost_model

    stated = document("tiny_02")
    next(node for node in stated["nodes"] if node["gpu"] == "H20")["count"] = 2
    model = make_model(Problem.model_validate(stated), CALIBRATED)
    plan = PlanDocument.model_validate_json(document_of(revised).model_dump_json().replace("h20-new", "h20-1"))
    assert revised.revision == 2
    assert "by the cost model calibrated" in revised.explanation
    tokens_per_second = model.score(plan).samples_per_second * model.demand.completion_tokens
    assert revised.expected_tokens_per_second == pytest.approx(tokens_per_second)
    # A slow machine's GPU is a type of its own, which keeps what was fitted for its kind.
    (slow,) = [gpu for gpu in constants.mfu_infer if gpu.startswith("H20 at")]
    assert constants.mfu_infer[slow] == constants.mfu_infer["H20"] == model.problem.cost_model.mfu("H20", "infer")


def slow_machines(fleet):
    return fleet.servicer._replanner._runs["r"].slow


async def test_a_machine_that_slows_is_planned_for_as_a_slower_one_and_the_revision_says_so(fleet):
    for index in (1, 2):
        await fleet.join(f"h20-extra{index}", "H20")
    fast = await fleet.pass_time(2 * COOL_DOWN_S, rates={"h20-0": measured(1.2)})
    assert {"h20-0", "h20-extra1", "h20-extra2"} <= machines(fast)

    rates = {"h20-0": measured(6.0), "h20-extra1": measured(1.2), "h20-extra2": measured(1.3, batch=8)}
    slow = await fleet.pass_time(2 * COOL_DOWN_S, rates=rates)

    assert slow_machines(fleet) == {"h20-0": 0.2}
    assert slow.revision == fast.revision + 1
    assert slow.expected_tokens_per_second < fast.expected_tokens_per_second
    assert "slower than machines like it or than it should be: h20-0 at 20%" in slow.explanation


def step_s(planned, plan):
    """A training step of the plan's trainers."""
    nodes = node_classes(planned)
    pool = [(nodes[name], gpus) for name, gpus in trainers(plan).items()]
    return training_step(planned, demand_of(planned), Network(planned.links), pool).step_s


def trained(plan, times_slower, *, run_id="r"):
    """What a run reports whose trainers take so many times as long for a step as the cost model expects."""
    stated = problem("tiny_02")
    rate = demand_of(stated).samples_per_step / step_s(stated, plan) / times_slower
    return pb.MeasuredRate(role=pb.ROLE_TRAINER, samples_per_second=rate, run_id=run_id)


async def test_a_runs_trainers_are_planned_for_at_the_speed_that_was_measured(fleet):
    def looked_at():
        return fleet.servicer._replanner._runs["r"].looked_at

    first = await fleet.pass_time(2 * COOL_DOWN_S)
    for rate in (trained(first, 1.08), trained(first, 4.0, run_id="another")):
        unchanged = await fleet.pass_time(2 * COOL_DOWN_S, rates={"h800-0": rate})
        assert unchanged.revision == 1
        assert looked_at() == problem("tiny_02")

    revised = await fleet.pass_time(2 * COOL_DOWN_S, rates={"h800-0": trained(first, 4.0)})
    types = {node_classes(problem("tiny_02"))[name].gpu for name in trainers(first)}
    assert {(rate.gpu, rate.role) for rate in looked_at().measured_rates} == {(gpu, "trainer") for gpu in types}
    assert step_s(looked_at(), first) == pytest.approx(4 * step_s(problem("tiny_02"), first), rel=0.05)
    assert revised.revision == 2
    assert revised.expected_tokens_per_second < first.expected_tokens_per_second
    assert "Trainers reach 25% of the speed that the cost model expects" in revised.explanation


async def test_reward_workers_are_planned_for_at_the_rate_that_was_measured():
    async with planned_fleet(registered=KINDS, keeps_trainers=True, reward={"seconds_per_sample": 1e-3}) as fleet:
        first = await fleet.pass_time(2 * COOL_DOWN_S)
        assert document_of(first).reward == ()
        planned = CostModel(problem("tiny_02")).score(document_of(first)).samples_per_second

        def scored(rate, run_id="r"):
            return pb.MeasuredRate(role=pb.ROLE_REWARD, samples_per_second=rate, run_id=run_id)

        # What the run's console says, whose name is none of the plan's, is of the head.
        await fleet.join("console-1", "cpu")
        for rate in (scored(950.0), scored(0.1, run_id="another")):
            assert (await fleet.pass_time(2 * COOL_DOWN_S, rates={"console-1": rate})).revision == 1
        revised = await fleet.pass_time(2 * COOL_DOWN_S, rates={"console-1": scored(0.6 * planned)})
        assert set(document_of(revised).reward) == set(KINDS)
        assert f"A reward worker scores {0.6 * planned:.2g} samples/s beside" in revised.explanation


async def test_a_machine_with_less_to_do_is_not_taken_for_a_slower_one(fleet):
    for index in (1, 2):
        await fleet.join(f"h20-extra{index}", "H20")
    rates = {"h20-0": measured(1.0, batch=4), "h20-extra1": measured(1.0), "h20-extra2": measured(1.0)}
    assert rates["h20-0"].tokens_per_second < 0.2 * rates["h20-extra1"].tokens_per_second
    await fleet.pass_time(2 * COOL_DOWN_S, rates=rates)

    assert slow_machines(fleet) == {}


async def test_a_machine_alone_of_its_kind_is_compared_with_the_cost_model_cautiously(fleet):
    await fleet.pass_time(2 * COOL_DOWN_S, rates={"h20-0": measured(1.7)})
    assert slow_machines(fleet) == {}
    await fleet.pass_time(2 * COOL_DOWN_S, rates={"h20-0": measured(4.0)})
    assert slow_machines(fleet) == {"h20-0": 0.2}
    await fleet.pass_time(2 * COOL_DOWN_S, rates={"h20-0": measured(1.8)})
    assert slow_machines(fleet) == {"h20-0": 0.6}
    await fleet.pass_time(2 * COOL_DOWN_S, rates={"h20-0": measured(1.5)})
    assert slow_machines(fleet) == {}


async def test_machines_that_report_only_tokens_per_second_are_compared_with_similar_ones(fleet):
    for index in (1, 2):
        await fleet.join(f"h20-extra{index}", "H20")
    told = {"h20-0": 100.0, "h20-extra1": 1000.0, "h20-extra2": 1000.0}
    rates = {name: pb.MeasuredRate(role=pb.ROLE_GENERATOR, tokens_per_second=rate) for name, rate in told.items()}
    await fleet.pass_time(2 * COOL_DOWN_S, rates=rates)

    assert "H20 at 10%" in fleet.servicer._replanner._runs["r"].looked_at.gpu_types


async def test_a_machine_that_never_registers_is_waited_for_and_then_done_without(unregistered):
    fleet = unregistered
    await fleet.ask("CreatePlan", going_on())
    await fleet.join("h20-new", "H20")
    early = await fleet.pass_time(GRACE_INTERVALS * INTERVAL_S)
    late = await fleet.pass_time(INTERVAL_S)

    assert "h20-0" in machines(early)
    assert "h20-0" not in machines(late)
    assert "h20-0 of the plan in force: not registered within 300 s" in late.explanation
    assert "h800-0" in trainers(late), "who only trains does not register"

    await fleet.join("h20-0", "H20")
    assert "h20-0" in machines(await fleet.pass_time(2 * COOL_DOWN_S))


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
    request = going_on()
    request.running_plan.assignments.add(node_id="desk", role=pb.ROLE_BROKER)
    request.running_plan.assignments.add(node_id="h20-0", role=pb.ROLE_SCHEDULER)
    await fleet.ask("CreatePlan", request)
    await fleet.join("h20-new", "H20")
    del fleet.alive["h20-0"]
    after = await fleet.pass_time(20.0)

    assert trainers(after) == {"h800-0": 8}
    # Nothing moves a broker or a scheduler, and they are no reason to revise.
    assert document_of(after).center == {"broker": "desk", "scheduler": "h20-0"}
    assert {each.node for each in document_of(after).gen} == {"h20-new"}
    assert "h20-0 of the plan in force: not there any more" in after.explanation
    assert "h20-new now used" in after.explanation


async def test_a_scheduler_that_forgot_takes_machines_in_again_at_once(fleet):
    await fleet.ask("CreatePlan", going_on())
    await fleet.join("h20-new", "H20")
    plan = await fleet.pass_time(1.0)

    assert "h20-new" in machines(plan)


async def test_a_scheduler_that_forgot_does_not_count_on_machines_that_the_run_does_without(unregistered):
    request = going_on()
    stated = document("tiny_02")
    next(node for node in stated["nodes"] if node["name"] == "h20")["count"] = 2
    request.problem_json = json.dumps(stated)
    plan = (await unregistered.ask("CreatePlan", request)).plan
    assert machines(plan) == {"h800-0", "h20-0"}
    assert (await unregistered.pass_time(1.0)).revision == plan.revision

    await unregistered.join("h20-1", "H20")
    assert machines(await unregistered.pass_time(1.0)) == {"h800-0", "h20-0", "h20-1"}


async def test_a_plan_that_is_asked_for_again_begins_with_the_one_in_force(fleet, monkeypatch):
    before = (await fleet.ask("GetPlan", pb.GetPlanRequest(run_id="r"))).plan
    begins = []

    def note(task, *, start, **_):
        begins.append(start)
        return pb.Plan(run_id=task.run_id)

    monkeypatch.setattr(scheduler_service, "plan_task", note)
    await fleet.ask("CreatePlan", pb.CreatePlanRequest(run_id="r", problem_json=json.dumps(document("tiny_02"))))

    assert begins == [document_of(before)]


async def test_an_invalid_running_plan_is_refused(fleet):
    request = pb.CreatePlanRequest(run_id="r", problem_json=json.dumps(document("tiny_02")))
    request.running_plan.assignments.add(node_id="h800-0", role=pb.ROLE_GENERATOR, tensor_parallel=100_000)
    with pytest.raises(InvalidFieldError, match="running_plan: is no plan"):
        await fleet.ask("CreatePlan", request)
