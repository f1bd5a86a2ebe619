"""A scheduler with a plan for the machines of tiny_02, on a clock that tests move."""

import json
from contextlib import asynccontextmanager
from unittest.mock import patch

from prometheus_client import CollectorRegistry

from penstock.clock import ManualClock
from penstock.network.rpc import call, service_of
from penstock.v1 import scheduler_pb2 as pb
from penstock.v1 import scheduler_pb2_grpc
from services.scheduler import service as scheduler_service
from services.scheduler.config import LengthsConfig
from services.scheduler.cost_model.reference import RM1
from services.scheduler.planning.plan_wire import plan_task
from services.scheduler.replanning.replan_rule import COOL_DOWN_INTERVALS
from services.scheduler.server import make_forecaster
from services.scheduler.service import SchedulerServicer
from tests.helpers.plans.problems import document
from tests.helpers.serving import channel_to

INTERVAL_S = 5.0
COOL_DOWN_S = COOL_DOWN_INTERVALS * INTERVAL_S
KINDS = {"h20-0": "H20", "h800-0": "H800"}


_solved: dict[str, pb.Plan] = {}
"""Plans that were asked for, by what was asked: a search that ends by itself finds the same again."""


def _solved_once(task, *, time_left, **rest):
    asked = f"{task} {rest}"
    if asked not in _solved:
        _solved[asked] = plan_task(task, time_left=time_left, **rest)
    plan = pb.Plan()
    plan.CopyFrom(_solved[asked])
    return plan


class Fleet:
    """A scheduler with the machines of tiny_02, each alive as long as it reports."""

    def __init__(self, channel, servicer, clock):
        self.channel, self.servicer, self.clock = channel, servicer, clock
        self.alive = {}

    async def ask(self, method, request):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)
        return await call(getattr(stub, method), request, peer="scheduler", timeout_s=60.0)

    async def join(self, name, kind, *, roles=()):
        node = pb.Node(node_id=name, accelerators=[pb.Accelerator(kind=kind, count=8)], roles=roles)
        await self.ask("RegisterNode", pb.RegisterNodeRequest(node=node))
        self.alive[name] = 0.0

    async def pass_time(self, seconds, *, rates=None):
        """Everybody alive reports, with rates by machine; then plans are looked at."""
        self.clock.advance(seconds)
        for name in self.alive:
            told = [(rates or {})[name]] if name in (rates or {}) else []
            await self.ask("ReportNode", pb.ReportNodeRequest(node_id=name, rates=told))
        await self.servicer.revise()
        return (await self.ask("GetPlan", pb.GetPlanRequest(run_id="r"))).plan


@asynccontextmanager
async def planned_fleet(*, registered, cost_model=RM1, keeps_trainers=False, reward=None):
    clock = ManualClock()
    lengths = make_forecaster(LengthsConfig(), clock=clock, registry=CollectorRegistry())
    servicer = SchedulerServicer(clock=clock, heartbeat_interval_s=INTERVAL_S, lengths=lengths, cost_model=cost_model)
    # On a busy machine a search that ends by itself must not be cut short: what it finds would differ.
    patient = patch.object(scheduler_service, "REVISE_BUDGET_S", 60.0)
    solved_once = patch.object(scheduler_service, "plan_task", _solved_once)
    with patient, solved_once, patch.object(scheduler_service, "DEFAULT_BUDGET_S", 60.0):
        async with channel_to(service_of(servicer)) as channel:
            fleet = Fleet(channel, servicer, clock)
            for name in registered:
                await fleet.join(name, KINDS[name])
            stated = document("tiny_02")
            stated["workload"] = {**stated["workload"], **({} if reward is None else {"reward": reward})}
            request = pb.CreatePlanRequest(run_id="r", problem_json=json.dumps(stated), keeps_trainers=keeps_trainers)
            await fleet.ask("CreatePlan", request)
            yield fleet
            await lengths.close()
