"""A trainer and a broker that play a run's script: enough to follow, lose and stop a run, with nothing trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from penstock.errors import InvalidFieldError, UnknownRunError
from penstock.network.rpc import Service, service_of
from penstock.v1 import broker_pb2, broker_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tests.helpers.brokers.trajectories import group


class ScriptedTrainer(trainer_pb2_grpc.TrainerServiceServicer):
    """Steps whenever `pace` allows; ends after the last one or when stopped."""

    def __init__(self, *, refusal: str = "", is_deaf: bool = False) -> None:
        self.starts: list[trainer_pb2.StartRunRequest] = []
        self.pace = asyncio.Semaphore(0)
        self.stopped = asyncio.Event()
        self.may_answer = asyncio.Event()
        """Cleared: that the run has begun is not answered yet."""
        self.may_answer.set()
        self.outcome = trainer_pb2.RUN_OUTCOME_COMPLETED
        self._refusal = refusal
        self._is_deaf = is_deaf
        self._num_steps = 0
        self._knows_run = False
        self._events: list[trainer_pb2.WatchRunResponse] = []
        self._incarnation = "first"

    @property
    def service(self) -> Service:
        return service_of(self)

    def forget(self) -> None:
        """Be a new process that knows nothing of the run."""
        self._knows_run = False
        self._events = []

    def resume_by_itself(self) -> None:
        """Be a new process that kept the run and goes on with it."""
        self._events = []
        self._incarnation += "+"

    async def StartRun(self, request: trainer_pb2.StartRunRequest, context: Any) -> trainer_pb2.StartRunResponse:
        if self._refusal:
            raise InvalidFieldError(self._refusal)
        self.starts.append(request)
        self._knows_run = True
        self._num_steps = json.loads(request.config_json)["run"]["num_steps"]
        await self.may_answer.wait()
        return trainer_pb2.StartRunResponse(run_dir="elsewhere")

    async def WatchRun(
        self, request: trainer_pb2.WatchRunRequest, context: Any
    ) -> AsyncIterator[trainer_pb2.WatchRunResponse]:
        if not self._knows_run:
            raise UnknownRunError(f"no run {request.run_id} here")
        is_known = request.incarnation in ("", self._incarnation)
        for event in self._events[max(0, request.from_sequence - 1) if is_known else 0 :]:
            yield event
        while not (self._events and self._events[-1].HasField("finished")):
            event = await self._next()
            yield event
            if event.WhichOneof("event") == "finished":
                return

    async def StopRun(self, request: trainer_pb2.StopRunRequest, context: Any) -> trainer_pb2.StopRunResponse:
        self.stopped.set()
        return trainer_pb2.StopRunResponse()

    async def _next(self) -> trainer_pb2.WatchRunResponse:
        event = trainer_pb2.WatchRunResponse(sequence=len(self._events) + 1, incarnation=self._incarnation)
        event.event_time.GetCurrentTime()
        done = sum(one.WhichOneof("event") == "step" for one in self._events)
        if not self._events:
            event.state_changed.state = trainer_pb2.TRAINER_STATE_TRAINING
        elif done == self._num_steps or not await self._may_step():
            self._finish(event, done)
        else:
            event.step.policy_version, event.step.num_steps = done + 1, self._num_steps
            event.step.metrics.update({"reward/mean": 0.25 * (done + 1), "time/step_s": 2.0, "time/idle_s": 0.5})
        self._events.append(event)
        return event

    def _finish(self, event: trainer_pb2.WatchRunResponse, done: int) -> None:
        event.finished.outcome = trainer_pb2.RUN_OUTCOME_STOPPED if self.stopped.is_set() else self.outcome
        event.finished.summary_json = json.dumps(
            {
                "run_id": "r1",
                "steps": done,
                "audit": {"submitted": 8, "trained": 8, "dropped": {}, "in_flight": 0, "balanced": True},
            }
        )

    async def _may_step(self) -> bool:
        step, stop = asyncio.create_task(self.pace.acquire()), asyncio.create_task(self._is_told_to_stop())
        try:
            await asyncio.wait({step, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Also when the call is cancelled: a waiter that is left behind would take the next step's permit.
            for task in (step, stop):
                task.cancel()
        return not stop.done()

    async def _is_told_to_stop(self) -> None:
        await (asyncio.Event() if self._is_deaf else self.stopped).wait()


class ScriptedRunBroker(broker_pb2_grpc.BrokerServiceServicer):
    """Answers what the console asks about a run."""

    def __init__(self, *, balanced: bool = True) -> None:
        dropped = {"stale": 2}
        self.audit = broker_pb2.Audit(submitted=10, trained=4, dropped=dropped, in_flight=4, balanced=balanced)
        self.audit.in_flight_by_state.update({"queued": 3, "leased": 1})

    @property
    def service(self) -> Service:
        return service_of(self)

    async def GetRun(self, request: broker_pb2.GetRunRequest, context: Any) -> broker_pb2.GetRunResponse:
        run = broker_pb2.GetRunResponse(run_id=request.run_id, policy_version=2, audit=self.audit)
        run.waits.add(waiter="trainer", owner="generator gen-0", reason="3 samples are being decoded")
        view = run.generators.add()
        view.hello.generator_id, view.hello.engine = "gen-0", "emulated"
        view.beat_time.GetCurrentTime()
        return run

    async def AuditRun(self, request: broker_pb2.AuditRunRequest, context: Any) -> broker_pb2.AuditRunResponse:
        return broker_pb2.AuditRunResponse(audit=self.audit)

    async def ExportTrajectories(
        self, request: broker_pb2.ExportTrajectoriesRequest, context: Any
    ) -> AsyncIterator[broker_pb2.ExportTrajectoriesResponse]:
        for version in range(max(1, request.from_policy_version), 3):
            yield broker_pb2.ExportTrajectoriesResponse(group=group(f"g{version}"), policy_version=version)
        if request.follow:
            yield broker_pb2.ExportTrajectoriesResponse(policy_version=2)
            await asyncio.Event().wait()

    async def ListRuns(self, request: broker_pb2.ListRunsRequest, context: Any) -> broker_pb2.ListRunsResponse:
        return broker_pb2.ListRunsResponse(run_ids=["r0", "r1"])
