"""Implements the scheduler's gRPC service: decode, call the core, encode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from penstock.clock import Clock
from penstock.errors import QueueFullError, ServiceUnavailableError, UnknownRunError, require
from penstock.names import check_run_id
from penstock.process.tasks import race
from penstock.tracing.measuring import measuring
from penstock.v1 import scheduler_pb2 as pb
from penstock.v1 import scheduler_pb2_grpc
from services.scheduler.cost_model.reference import RM1
from services.scheduler.lengths.forecaster import LengthForecaster
from services.scheduler.planning import plan_metrics
from services.scheduler.planning.first_fit import SOLVER, first_fit
from services.scheduler.planning.machine_registry import MAX_NODES, Inventory
from services.scheduler.planning.plan_message import described, document_of, keep_center
from services.scheduler.planning.plan_wire import PlanTask, checked_task, plan_task
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.replanning.live_problem import Live, live_problem, machines_of, never_came
from services.scheduler.replanning.replanner import LOOK_EVERY_S, Replanner, running_plan
from services.scheduler.solvers.interface import TimeLeft

MAX_QUERIES = 1024
MAX_OBSERVATIONS = 4096
MAX_GENERATORS = 10_000
MAX_PLANS = 1_000
MAX_SOLVING = 2
"""Concurrent solves; each takes a core."""
REVISE_BUDGET_S = 5.0
DEFAULT_BUDGET_S, MAX_BUDGET_S = 10.0, 600.0
_SOLVERS = ("", "auto", SOLVER)

Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers from memory; after a restart machines register again, and plans are recomputed."""

    def __init__(
        self, *, clock: Clock, heartbeat_interval_s: float, lengths: LengthForecaster, cost_model: str = RM1
    ) -> None:
        self.stopping = asyncio.Event()
        self._clock = clock
        self._heartbeat_interval_s = heartbeat_interval_s
        self._inventory = Inventory(heartbeat_interval_s=heartbeat_interval_s)
        self._machine_gauges = plan_metrics.MachineGauges()
        self.lengths = lengths
        self._plans: dict[str, pb.Plan] = {}
        self._plan_changed = asyncio.Event()
        self._num_solving = 0
        self._left: set[str] = set()
        self._cost_model = cost_model
        self._replanner = Replanner(heartbeat_interval_s=heartbeat_interval_s)

    async def RegisterNode(self, request: pb.RegisterNodeRequest, context: Context) -> pb.RegisterNodeResponse:
        """Add or replace a machine."""
        self._inventory.register(request.node, list(request.links), now_s=self._clock.monotonic_s())
        self._left.discard(request.node.node_id)
        response = pb.RegisterNodeResponse()
        response.heartbeat_interval.FromMilliseconds(int(self._heartbeat_interval_s * 1000))
        return response

    async def ReportNode(self, request: pb.ReportNodeRequest, context: Context) -> pb.ReportNodeResponse:
        """Record a heartbeat and measured rates."""
        self._inventory.report(request, now_s=self._clock.monotonic_s())
        if request.is_leaving and len(self._left) < MAX_NODES:
            self._left.add(request.node_id)
        return pb.ReportNodeResponse()

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesResponse:
        """The inventory."""
        return pb.ListNodesResponse(nodes=self._views(), links=self._inventory.links())

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.GetPlanResponse:
        """The plan in force."""
        return pb.GetPlanResponse(plan=self._plan_of(request.run_id))

    async def CreatePlan(self, request: pb.CreatePlanRequest, context: Context) -> pb.CreatePlanResponse:
        """Plan a run: over the machines of its problem, or by first fit over the live ones."""
        _check_plan_request(request)
        if request.problem_json:
            task = checked_task(request, cost_model=self._cost_model)
            running = running_plan(request.running_plan) if request.HasField("running_plan") else None
            with measuring("rl.plan.solve", {"rl.plan.problem": task.problem.id}, run_id=request.run_id) as measured:
                plan = await self._solved(task, request, running)
                measured.attributes |= described(plan)
            self._replanner.follow(task, plan, running=running, now_s=self._clock.monotonic_s())
        else:
            self._replanner.forget(request.run_id)
            plan = first_fit(self._views(), run_id=request.run_id, num_generators=request.num_generators)
        self._put_in_force(plan)
        return pb.CreatePlanResponse(plan=plan)

    async def revise(self) -> None:
        """Reconsider every solved plan, and put better ones in force."""
        if self._num_solving >= MAX_SOLVING:
            return
        now_s, views = self._clock.monotonic_s(), self._views()
        self._num_solving += 1
        try:
            plans = await self._replanner.revise(
                views, left=frozenset(self._left), now_s=now_s, make_budget=partial(self._budget, REVISE_BUDGET_S)
            )
        finally:
            self._num_solving -= 1
        for plan in plans:
            self._put_in_force(plan)

    async def revise_forever(self) -> None:
        """Reconsider the plans every few seconds."""
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._heartbeat_interval_s))
            self._machine_gauges.observe(self._views())
            await self.revise()

    async def WatchPlan(self, request: pb.WatchPlanRequest, context: Context) -> AsyncIterator[pb.WatchPlanResponse]:
        """The plan in force, then each revision."""
        sent = 0
        while not self.stopping.is_set():
            changed = self._plan_changed
            plan = self._plan_of(request.run_id)
            if plan.revision > sent:
                sent = plan.revision
                yield pb.WatchPlanResponse(plan=plan)
            await race(changed.wait(), self.stopping.wait())
        raise ServiceUnavailableError("the scheduler is stopping; watch again")

    async def ForecastLengths(self, request: pb.ForecastLengthsRequest, context: Context) -> pb.ForecastLengthsResponse:
        """Expected completion lengths."""
        check_run_id(request.run_id)
        require(len(request.queries) <= MAX_QUERIES, "queries", len(request.queries), f"at most {MAX_QUERIES}")
        forecasts, run = await self.lengths.forecast(request.run_id, request.queries)
        return pb.ForecastLengthsResponse(forecasts=forecasts, model_version=run.progress.model_version)

    async def ReportLengths(self, request: pb.ReportLengthsRequest, context: Context) -> pb.ReportLengthsResponse:
        """Learn from observed completions."""
        check_run_id(request.run_id)
        num_observations = len(request.observations)
        require(num_observations <= MAX_OBSERVATIONS, "observations", num_observations, f"at most {MAX_OBSERVATIONS}")
        self._replanner.observe_lengths(request.run_id, [each.num_completion_tokens for each in request.observations])
        await self.lengths.observe(request.run_id, request.observations)
        return pb.ReportLengthsResponse()

    async def GetLengthModel(self, request: pb.GetLengthModelRequest, context: Context) -> pb.GetLengthModelResponse:
        """Describe the current forecaster of lengths."""
        return self.lengths.describe(request.run_id)

    def _views(self) -> list[pb.NodeView]:
        return self._inventory.views(now_s=self._clock.monotonic_s(), unix_s=self._clock.now_s())

    def _put_in_force(self, plan: pb.Plan) -> None:
        if plan.run_id not in self._plans and len(self._plans) >= MAX_PLANS:
            oldest = next(iter(self._plans))
            self._plans.pop(oldest)
            self._replanner.forget(oldest)
            plan_metrics.forget(oldest)
        plan.revision = self._plans[plan.run_id].revision + 1 if plan.run_id in self._plans else 1
        plan.create_time.FromMilliseconds(int(self._clock.now_s() * 1000))
        self._plans[plan.run_id] = plan
        plan_metrics.observe(plan)
        self._plan_changed.set()
        self._plan_changed = asyncio.Event()

    async def _solved(self, task: PlanTask, request: pb.CreatePlanRequest, running: PlanDocument | None) -> pb.Plan:
        if self._num_solving >= MAX_SOLVING:
            raise QueueFullError(f"{MAX_SOLVING} problems are being solved; ask again later", queue="plans")
        budget_s = request.budget.ToNanoseconds() / 1e9 if request.HasField("budget") else DEFAULT_BUDGET_S
        time_left = self._budget(budget_s)
        live = Live(task.problem, {})
        before = start = None
        if running is not None:
            # The machines of its plan count as present, and those that have registered.
            views = self._views()
            missing = never_came(task.problem, running, views) - machines_of(running)
            live = live_problem(task.problem, views, left=frozenset(self._left), missing=missing)
            before, start = request.running_plan, live.from_real(running)
        elif (in_force := self._plans.get(request.run_id)) is not None and in_force.solver != SOLVER:
            before, start = in_force, document_of(in_force)
        self._num_solving += 1
        solving = asyncio.create_task(
            asyncio.to_thread(
                plan_task,
                replace(task, problem=live.problem or task.problem),
                time_left=time_left,
                is_advised=True,
                start=start,
                keeps_pool=running is not None,
            )
        )
        # The thread runs until its time is over even when the caller has left, and counts as solving until then.
        solving.add_done_callback(self._solving_ended)
        plan = await asyncio.shield(solving)
        live.to_real(plan)
        if before is not None:
            keep_center(plan, before)
        return plan

    def _solving_ended(self, solving: asyncio.Task[pb.Plan]) -> None:
        self._num_solving -= 1
        if not solving.cancelled():
            solving.exception()

    def _budget(self, seconds: float) -> TimeLeft:
        """Seconds left of a budget that starts now; none once the process stops."""
        end_s = time.monotonic() + seconds
        return lambda: 0.0 if self.stopping.is_set() else end_s - time.monotonic()

    def _plan_of(self, run_id: str) -> pb.Plan:
        plan = self._plans.get(run_id)
        if plan is None:
            raise UnknownRunError(f"run_id: no plan was made for {run_id!r}; call CreatePlan", run_id=run_id)
        return plan


def _check_plan_request(request: pb.CreatePlanRequest) -> None:
    check_run_id(request.run_id)
    num_generators, most = request.num_generators, 0 if request.problem_json else MAX_GENERATORS
    expected = f"at most {most}; 0 with a problem_json, whose plan says how many generate"
    require(num_generators <= most, "num_generators", num_generators, expected)
    if request.HasField("budget"):
        budget_s = request.budget.ToNanoseconds() / 1e9
        require(0 < budget_s <= MAX_BUDGET_S, "budget", budget_s, f"above 0 and at most {MAX_BUDGET_S:.0f} s")
    if not request.problem_json:
        require(request.solver in _SOLVERS, "solver", request.solver, f"auto or {SOLVER} without a problem_json")
