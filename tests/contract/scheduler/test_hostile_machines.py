"""Machines that state and report nonsense: it is refused or borne, and plans go on being looked at."""

import pytest

from penstock.errors import InvalidFieldError
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler import service as scheduler_service
from services.scheduler.planning.machine_registry import CONCURRENT_SAMPLES, MAX_ACCELERATORS, MAX_RATES, TOKEN_S
from tests.helpers.fuzzing.grpc_requests import Fuzzer, answer
from tests.helpers.plans.planned_fleet import COOL_DOWN_S, KINDS, planned_fleet

NUM_ROUNDS, NUM_LOOKS = 40, 4
METHODS = pb.DESCRIPTOR.services_by_name["SchedulerService"].methods_by_name


@pytest.fixture
async def fleet():
    async with planned_fleet(registered=KINDS) as fleet:
        yield fleet


def generating(**measured):
    return pb.MeasuredRate(role=pb.ROLE_GENERATOR, **measured)


async def test_plans_are_looked_at_whatever_machines_say(fleet, monkeypatch):
    monkeypatch.setattr(scheduler_service, "REVISE_BUDGET_S", 0.2)
    fuzzer = Fuzzer(21, names=(*KINDS, *KINDS.values(), "r0"))
    rate = generating(tokens_per_second=5.0, token_s=0.1, num_concurrent_samples=2.0)
    node = pb.Node(node_id="new", accelerators=[pb.Accelerator(kind="H20", count=8)], price_per_hour=3.0)
    honest = {
        "RegisterNode": pb.RegisterNodeRequest(node=node),
        "ReportNode": pb.ReportNodeRequest(node_id="h20-0", rates=[rate], generator_start_s=20.0),
    }
    for _ in range(NUM_LOOKS):
        for _ in range(NUM_ROUNDS // NUM_LOOKS):
            for name, request in honest.items():
                for nonsense in fuzzer.requests(METHODS[name], [request]):
                    await answer(fleet.channel, METHODS[name], nonsense)
        fleet.clock.advance(COOL_DOWN_S)
        await fleet.servicer.revise()

    assert (await fleet.ask("GetPlan", pb.GetPlanRequest(run_id="r"))).plan.assignments


@pytest.mark.parametrize("token_s", TOKEN_S)
@pytest.mark.parametrize("num_samples", CONCURRENT_SAMPLES)
async def test_rates_that_no_machine_has_are_planned_with_all_the_same(fleet, token_s, num_samples):
    rate = generating(token_s=token_s, num_concurrent_samples=num_samples)

    assert (await fleet.pass_time(2 * COOL_DOWN_S, rates={"h20-0": rate})).assignments


@pytest.mark.parametrize(
    "wrong",
    [
        pb.ReportNodeRequest(rates=[generating(token_s=0.0, num_concurrent_samples=1.0)]),
        pb.ReportNodeRequest(rates=[generating(token_s=0.1)]),
        pb.ReportNodeRequest(rates=[generating(tokens_per_second=1e300)]),
        pb.ReportNodeRequest(rates=[generating()] * (MAX_RATES + 1)),
        pb.ReportNodeRequest(generator_start_s=float("nan")),
    ],
    ids=lambda request: str(request)[:40],
)
async def test_impossible_reports_are_refused_and_are_no_heartbeat(fleet, wrong):
    wrong.node_id = "h20-0"
    fleet.clock.advance(1000.0)
    with pytest.raises(InvalidFieldError, match=r"rates|generator_start_s"):
        await fleet.ask("ReportNode", wrong)
    nodes = (await fleet.ask("ListNodes", pb.ListNodesRequest())).nodes

    assert [view.is_alive for view in nodes if view.node.node_id == "h20-0"] == [False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"accelerators": [pb.Accelerator(kind="H20", count=1)] * (MAX_ACCELERATORS + 1)},
        {"accelerators": [pb.Accelerator(kind="H" * 129, count=1)]},
        {"accelerators": [pb.Accelerator(kind="H20", count=1)], "site": "s" * 129},
        {"accelerators": [pb.Accelerator(kind="H20", count=1)], "roles": [pb.ROLE_GENERATOR] * 100},
    ],
    ids=("accelerators", "kind", "site", "roles"),
)
async def test_statements_without_bound_are_refused(fleet, wrong):
    with pytest.raises(InvalidFieldError, match="node"):
        await fleet.ask("RegisterNode", pb.RegisterNodeRequest(node=pb.Node(node_id="new", **wrong)))
