import asyncio
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from console.cli import app
from console.plan import plan_command
from console.view.forecast_quality import fetch_lengths, length_lines, lengths_table
from penstock.clients.scheduler.inventory import report_node, this_machine
from penstock.clock import ManualClock
from penstock.errors import InvalidFieldError, PenstockError, QueueFullError, UnknownRunError
from penstock.network.rpc import call, open_channel, service_of, wait_until_serving
from penstock.security import NO_SECURITY
from penstock.v1 import scheduler_pb2 as pb
from penstock.v1 import scheduler_pb2_grpc
from services.scheduler import service as scheduler_service
from services.scheduler.config import LengthsConfig
from services.scheduler.cost_model.calibrated import COST_MODELS, make_model
from services.scheduler.cost_model.reference import RM1, CostModel
from services.scheduler.planning.plan_message import document_of
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.server import make_forecaster
from services.scheduler.service import MAX_QUERIES, SchedulerServicer
from services.scheduler.solvers.registry import SOLVERS
from tests.helpers.plans.problems import INSTANCES, document, problem
from tests.helpers.serving import channel_to, serving


def scheduler(interval_s=5.0, cost_model=RM1):
    clock = ManualClock()
    lengths = make_forecaster(LengthsConfig(), clock=clock, registry=CollectorRegistry())
    return service_of(
        SchedulerServicer(clock=clock, heartbeat_interval_s=interval_s, lengths=lengths, cost_model=cost_model)
    )


async def ask(channel, method, request):
    return await call(getattr(scheduler_pb2_grpc.SchedulerServiceStub(channel), method), request, peer="scheduler")


def problem_request(name, *overrides):
    return pb.CreatePlanRequest(run_id="r", problem_json=json.dumps(document(name, *overrides)))


async def test_a_registered_machine_is_listed_and_planned_for():
    async with channel_to(scheduler()) as channel:
        await ask(channel, "RegisterNode", pb.RegisterNodeRequest(node=this_machine(node_id="here")))
        created = await ask(channel, "CreatePlan", pb.CreatePlanRequest(run_id="r", num_generators=2))
        read = await ask(channel, "GetPlan", pb.GetPlanRequest(run_id="r"))
        nodes = (await ask(channel, "ListNodes", pb.ListNodesRequest())).nodes

    assert read.plan == created.plan
    assert created.plan.revision == 1
    assert {each.node_id for each in created.plan.assignments} == {"here"}
    assert [view.is_alive for view in nodes] == [True]


async def test_watching_a_plan_gives_the_one_in_force_and_then_revisions():
    async with channel_to(scheduler()) as channel:
        await ask(channel, "RegisterNode", pb.RegisterNodeRequest(node=this_machine(node_id="here")))
        await ask(channel, "CreatePlan", pb.CreatePlanRequest(run_id="r"))
        stream = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchPlan(pb.WatchPlanRequest(run_id="r"), timeout=10)
        first = await stream.read()
        await ask(channel, "CreatePlan", pb.CreatePlanRequest(run_id="r"))
        second = await stream.read()
        stream.cancel()

    assert [first.plan.revision, second.plan.revision] == [1, 2]


@pytest.mark.parametrize(
    ("method", "request_", "error"),
    [
        ("GetPlan", pb.GetPlanRequest(run_id="nobody"), UnknownRunError),
        ("CreatePlan", pb.CreatePlanRequest(), InvalidFieldError),
        ("CreatePlan", pb.CreatePlanRequest(run_id="r", solver="oracle"), InvalidFieldError),
        ("CreatePlan", pb.CreatePlanRequest(run_id="r", solver="exhaustive"), InvalidFieldError),
        ("CreatePlan", pb.CreatePlanRequest(run_id="r", problem_json="{}"), InvalidFieldError),
        ("CreatePlan", pb.CreatePlanRequest(run_id="r", problem_json="{}", solver="first_fit"), InvalidFieldError),
        ("CreatePlan", pb.CreatePlanRequest(run_id="r", problem_json="{}", num_generators=1), InvalidFieldError),
        ("CreatePlan", pb.CreatePlanRequest(run_id="r", problem_json=" " * (2 << 20)), InvalidFieldError),
        ("CreatePlan", pb.CreatePlanRequest(run_id="r", budget=Duration(seconds=-1)), InvalidFieldError),
        ("CreatePlan", pb.CreatePlanRequest(run_id="r", budget=Duration(seconds=3600)), InvalidFieldError),
        ("RegisterNode", pb.RegisterNodeRequest(), InvalidFieldError),
        (
            "ForecastLengths",
            pb.ForecastLengthsRequest(queries=[pb.LengthQuery()] * (MAX_QUERIES + 1)),
            InvalidFieldError,
        ),
        ("ReportNode", pb.ReportNodeRequest(node_id="stranger"), PenstockError),
    ],
)
async def test_bad_requests_are_refused_with_a_reason(method, request_, error):
    async with channel_to(scheduler()) as channel:
        with pytest.raises(error):
            await ask(channel, method, request_)


async def test_a_problem_is_answered_with_the_plan_that_is_best_for_its_machines():
    async with channel_to(scheduler()) as channel:
        plan = (await ask(channel, "CreatePlan", problem_request("tiny_02"))).plan
        read = (await ask(channel, "GetPlan", pb.GetPlanRequest(run_id="r"))).plan

    model = CostModel(problem("tiny_02"))
    assert read == plan
    assert plan.revision == 1
    assert plan.solver in SOLVERS
    assert plan.expected_tokens_per_second == pytest.approx(13.170059514017444 * model.demand.completion_tokens)
    assert plan.bound_tokens_per_second == pytest.approx(plan.expected_tokens_per_second)
    used = {}
    for each in plan.assignments:
        used.setdefault(each.node_id, []).extend(each.accelerator_indices)
    assert used == {name: list(range(8)) for name in ("h800-0", "h20-0")}
    for role in (pb.ROLE_GENERATOR, pb.ROLE_TRAINER):
        assert sum(each.share for each in plan.assignments if each.role == role) == pytest.approx(1)


@pytest.mark.parametrize(
    "cost_model", [pytest.param(name, marks=[pytest.mark.grid] * (name == RM1)) for name in COST_MODELS]
)
@pytest.mark.slow
async def test_the_command_line_and_the_service_plan_alike_with_either_cost_model(cost_model, monkeypatch):
    monkeypatch.setattr(plan_command, "steady_rate", lambda *_, **__: None)
    # Both searches end by themselves; on a busy machine one that is cut short would find another plan.
    monkeypatch.setattr(scheduler_service, "DEFAULT_BUDGET_S", 60.0)
    patient = ["--budget-s", "60", "--json"]
    path = str(INSTANCES / "tiny_04.json")
    answer = json.loads(CliRunner().invoke(app, ["plan", path, "--cost-model", cost_model, *patient]).output)
    async with channel_to(scheduler(cost_model=cost_model)) as channel:
        plan = (await ask(channel, "CreatePlan", problem_request("tiny_04"))).plan

    # Plans by RM-1's rules state no batches; the wire does.
    # Of a run that states no plan, the service leaves broker and scheduler where they are.
    served = document_of(plan)
    assert served.broker is None
    gen = tuple(each.model_copy(update={"batch": None}) for each in served.gen)
    stated = PlanDocument.model_validate(answer["rm1_plan"])
    assert served.model_copy(update={"gen": gen, "broker": stated.broker, "scheduler": stated.scheduler}) == stated
    assert [each.batch for each in served.gen] == [each["batch"] for each in answer["generation"]]
    assert plan.solver == answer["solver"]
    assert plan.expected_tokens_per_second == answer["tokens_per_second"]
    assert plan.cost_per_million_tokens == answer["usd_per_million_tokens"]
    assert f"by the cost model {cost_model}, limited by {answer['limit']};" in plan.explanation
    truth = make_model(problem("tiny_04"), cost_model).score(document_of(plan)).samples_per_second
    assert answer["samples_per_second"] == truth


async def test_a_problem_that_no_plan_solves_is_answered_with_the_reason():
    async with channel_to(scheduler()) as channel:
        with pytest.raises(PenstockError, match=r"no plan can run: training needs 960 GB.*\(r0\) offers 890 GB"):
            await ask(channel, "CreatePlan", problem_request("tiny_04", "model.params=60e9"))
        with pytest.raises(UnknownRunError):
            await ask(channel, "GetPlan", pb.GetPlanRequest(run_id="r"))


async def test_more_problems_at_once_than_cores_are_set_aside_for_are_refused(monkeypatch):
    begun, may_end = threading.Semaphore(0), threading.Event()

    def plan_slowly(task, **_):
        begun.release()
        assert may_end.wait(timeout=30)
        return pb.Plan(run_id=task.run_id)

    monkeypatch.setattr(scheduler_service, "plan_task", plan_slowly)
    async with channel_to(scheduler()) as channel:
        asked = [asyncio.create_task(ask(channel, "CreatePlan", problem_request("tiny_02"))) for _ in range(2)]
        for _ in asked:
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        with pytest.raises(QueueFullError):
            await ask(channel, "CreatePlan", problem_request("tiny_02"))
        may_end.set()
        await asyncio.gather(*asked)
        await ask(channel, "CreatePlan", problem_request("tiny_02"))


async def test_lengths_reported_are_forecast():
    query = pb.LengthQuery(group_id="g")
    async with channel_to(scheduler()) as channel:
        report = pb.ReportLengthsRequest(run_id="r")
        report.observations.add(query=query, num_completion_tokens=40)
        await ask(channel, "ReportLengths", report)
        answer = await ask(channel, "ForecastLengths", pb.ForecastLengthsRequest(run_id="r", queries=[query]))

    assert answer.forecasts[0].expected_tokens == 40


async def test_the_quality_of_length_forecasts_is_reported_and_shown():
    rng = np.random.default_rng(0)
    service = scheduler()
    async with serving(service) as (_, target), open_channel(target) as channel:
        with pytest.raises(UnknownRunError):
            await ask(channel, "GetLengthModel", pb.GetLengthModelRequest(run_id="r"))
        for part in range(2):
            asked = pb.ForecastLengthsRequest(run_id="r")
            report = pb.ReportLengthsRequest(run_id="r")
            for index in range(200):
                kind = int(rng.integers(10))
                words = np.array([kind, *rng.integers(100, 200, size=5)], dtype="<i4").tobytes()
                asked.queries.add(group_id=f"g{part}-{index}", prompt_token_ids=words, num_prompt_tokens=6)
                # By group alone, as brokers report it.
                length = round((kind + 1) * 50 * rng.lognormal(0, 0.1))
                report.observations.add(query=pb.LengthQuery(group_id=f"g{part}-{index}"), num_completion_tokens=length)
            answer = await ask(channel, "ForecastLengths", asked)
            assert answer.model_version == part
            await ask(channel, "ReportLengths", report)
            await service.servicer.lengths.refresh()
        forecast = answer.forecasts[0]
        assert 0 < forecast.low_tokens < forecast.expected_tokens < forecast.high_tokens
        described = await ask(channel, "GetLengthModel", pb.GetLengthModelRequest(run_id="r"))
        shown = await fetch_lengths("r", target, NO_SECURITY)
        assert await fetch_lengths("another", target, NO_SECURITY) is None
    assert await fetch_lengths("r", target, NO_SECURITY) is None
    assert (described.model_version, described.model, described.num_observations) == (2, "ridge", 400)
    tests = [(each.forecaster, each.test) for each in described.qualities]
    held_out, prequential = pb.LENGTH_TEST_HELD_OUT, pb.LENGTH_TEST_PREQUENTIAL
    assert tests == [(name, test) for test in (held_out, prequential) for name in ("ridge", "prompt_length")]
    assert described.qualities[2].num_samples == 200
    assert described.qualities[2].recall_longest_20_percent > 0.7
    lines = list(length_lines(shown))
    assert lines[0] == "lengths: ridge, version 2, from 400 lengths of 400 prompts"
    assert lines[3].startswith("  ridge, prequential: finds 0.")
    assert lines[3].endswith(" % in the 80 % interval")
    assert "prompt_length" in lengths_table({"lengths": json.loads(json.dumps(shown))})


async def test_a_node_registers_again_with_a_scheduler_that_forgot_it():
    async with serving(scheduler(interval_s=0.5)) as (server, target):
        measured = pb.MeasuredRate(role=pb.ROLE_GENERATOR, tokens_per_second=7)
        reporting = asyncio.create_task(
            report_node(target, this_machine(node_id="n"), measure=lambda: [measured], security=NO_SECURITY)
        )
        assert await wait_until_serving(target, service="penstock.v1.SchedulerService", timeout_s=5)
        async with open_channel(target) as channel:
            await _until_listed(channel, "n")
            await ask(channel, "ReportNode", pb.ReportNodeRequest(node_id="n", is_leaving=True))
            await _until_listed(channel, "n")
        reporting.cancel()
        assert server.port > 0


async def _until_listed(channel, name):
    async with asyncio.timeout(20):
        while True:
            nodes = (await ask(channel, "ListNodes", pb.ListNodesRequest())).nodes
            if any(view.node.node_id == name and view.rates for view in nodes):
                return
            await asyncio.sleep(0)


def test_a_scheduler_process_loads_neither_torch_nor_transformers():
    program = "import sys, services.scheduler.server; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "set()"
