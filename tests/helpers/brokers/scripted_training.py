"""A broker that only knows what a trainer calls: every submitted prompt comes back as a scored group at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np

from penstock.errors import (
    PenstockError,
    QueueFullError,
    ServiceUnavailableError,
    UnknownRunError,
    VersionConflictError,
)
from penstock.network.rpc import Service, service_of
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes

POLL_S = 0.01


def scored_group(prompt: types_pb2.Prompt, *, policy_version: int, num_tokens: int = 5) -> types_pb2.TrajectoryGroup:
    """Completions of token 5 + sample index; every other one is right."""
    group = types_pb2.TrajectoryGroup(prompt=prompt, min_policy_version=policy_version)
    for index in range(prompt.group_size):
        group.trajectories.add(
            key=types_pb2.SampleKey(group_id=prompt.group_id, sample_index=index),
            num_leases=1,
            token_ids=int32_bytes([5 + index % 8] * num_tokens),
            behavior_logprobs=float32_bytes([-3.0] * num_tokens),
            policy_versions=encode_versions(np.full(num_tokens, policy_version)),
            finish_reason=types_pb2.FINISH_REASON_STOP,
            score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=float(index % 2)),
            min_policy_version=policy_version,
            max_policy_version=policy_version,
        )
    return group


class ScriptedTrainingBroker(broker_pb2_grpc.BrokerServiceServicer):
    """One run, kept in memory. Knobs are plain attributes that a test sets before or while it runs."""

    def __init__(self, *, max_queued: int = 64) -> None:
        self.max_queued = max_queued
        self.make_group: Callable[..., types_pb2.TrajectoryGroup] = scored_group
        self.opened: list[broker_pb2.OpenRunRequest] = []
        self.hellos: list[broker_pb2.TrainerHello] = []
        self.acks: list[broker_pb2.AckStepRequest] = []
        self.dropped: dict[str, str] = {}
        self.prompts: dict[str, types_pb2.Prompt] = {}
        self.ready: list[str] = []
        self.delivered: dict[str, str] = {}
        self.trained: dict[str, int] = {}
        self.policy_version = 0
        self.history = 0
        self.is_closed = False
        self.num_refused = 0
        self.is_handing_out = True
        self.refuse_group_id = ""
        self.break_streams_after = 0
        """Break that many microbatch streams, each after its next microbatch."""
        self.lose_acks = 0
        self.lost_ack_error: type[PenstockError] = VersionConflictError
        """Forget that many acknowledgements before they take effect, and refuse the next with VERSION_CONFLICT."""

    def service(self) -> Service:
        return service_of(self)

    async def OpenRun(self, request, context):
        existed = bool(self.opened)
        self.opened.append(request)
        if request.policy_version < self.policy_version:
            self.history += 1
            for group_id in [g for g, version in self.trained.items() if version > request.policy_version]:
                del self.trained[group_id]
                self.ready.append(group_id)
        for step in request.steps:
            if step.policy_version > self.policy_version:
                self._mark_trained(step.group_ids, step.policy_version)
        self.policy_version = request.policy_version
        self.is_closed = False
        return broker_pb2.OpenRunResponse(
            policy_version=self.policy_version,
            existed=existed,
            history=self.history,
            num_groups_in_flight=len(self._live()),
        )

    async def CloseRun(self, request, context):
        self.is_closed = True
        if request.drop_reason:
            self.dropped |= dict.fromkeys(self._live(), request.drop_reason)
        return broker_pb2.CloseRunResponse()

    async def SubmitPrompts(self, request, context):
        self._require_run(request.run_id)
        response = broker_pb2.SubmitPromptsResponse()
        for index, prompt in enumerate(request.prompts):
            if prompt.group_id == self.refuse_group_id:
                response.errors.add(index=index, code=3, reason="INVALID_FIELD", message="scripted refusal")
                continue
            if prompt.group_id in self.prompts:
                continue
            num_waiting = sum(self.prompts[each].purpose == prompt.purpose for each in self.ready)
            if num_waiting >= self.max_queued:
                self.num_refused += 1
                response.errors.add(index=index, code=8, reason=QueueFullError.reason, message="queue is full")
                response.retry_delay.FromMilliseconds(20)
                continue
            self.prompts[prompt.group_id] = prompt
            self.ready.append(prompt.group_id)
        return response

    async def StreamMicrobatches(self, request_iterator, context) -> AsyncIterator[object]:
        first = await context.read()
        hello = first.hello
        self._require_run(hello.run_id)
        self.hellos.append(hello)
        for group_id in [g for g, consumer in self.delivered.items() if consumer == hello.consumer_id]:
            if group_id not in hello.held_group_ids:
                del self.delivered[group_id]
                self.ready.insert(0, group_id)
        credit = [first.credit_total]
        reader = asyncio.ensure_future(self._read_credits(context, credit))
        num_sent = 0
        try:
            yield self._waiting()
            while not self.is_closed:
                group_ids = self._next(hello, credit[0] - num_sent)
                if not group_ids:
                    await asyncio.sleep(POLL_S)
                    continue
                num_sent += len(group_ids)
                groups = [self.make_group(self.prompts[g], policy_version=self.policy_version) for g in group_ids]
                microbatch = broker_pb2.Microbatch(groups=groups, policy_version=self.policy_version)
                yield broker_pb2.StreamMicrobatchesResponse(microbatch=microbatch)
                if self.break_streams_after:
                    self.break_streams_after -= 1
                    raise ServiceUnavailableError("scripted break")
        finally:
            reader.cancel()

    async def AckStep(self, request, context):
        if self.lose_acks:
            self.lose_acks -= 1
            raise self.lost_ack_error("scripted")
        if request.policy_version not in (self.policy_version, self.policy_version + 1):
            raise VersionConflictError(f"run is at {self.policy_version}")
        if request.policy_version == self.policy_version + 1:
            self.acks.append(request)
            self._mark_trained(request.group_ids, request.policy_version)
            self.policy_version = request.policy_version
        return broker_pb2.AckStepResponse(policy_version=self.policy_version)

    async def DropGroups(self, request, context):
        for group_id in request.group_ids:
            if group_id in self.prompts and group_id not in self.trained:
                self.dropped.setdefault(group_id, request.reason)
                self.delivered.pop(group_id, None)
                if group_id in self.ready:
                    self.ready.remove(group_id)
        return broker_pb2.DropGroupsResponse()

    async def ExportTrajectories(self, request, context) -> AsyncIterator[object]:
        self._require_run(request.run_id)
        version = max(1, request.from_policy_version)
        while not self.is_closed:
            if version > self.policy_version:
                await asyncio.sleep(POLL_S)
                continue
            for group_id in [g for g, trained_by in self.trained.items() if trained_by == version]:
                group = self.make_group(self.prompts[group_id], policy_version=version - 1)
                yield broker_pb2.ExportTrajectoriesResponse(group=group, policy_version=version, history=self.history)
            yield broker_pb2.ExportTrajectoriesResponse(policy_version=version, history=self.history)
            version += 1

    async def GetRun(self, request, context):
        self._require_run(request.run_id)
        return broker_pb2.GetRunResponse(run_id=request.run_id, audit=self.books())

    async def AuditRun(self, request, context):
        self._require_run(request.run_id)
        return broker_pb2.AuditRunResponse(audit=self.books())

    def books(self) -> broker_pb2.Audit:
        size = {group_id: prompt.group_size for group_id, prompt in self._training().items()}
        audit = broker_pb2.Audit(
            submitted=sum(size.values()),
            trained=sum(size[group_id] for group_id in self.trained),
            in_flight=sum(size[group_id] for group_id in self._live()),
            policy_version=self.policy_version,
        )
        for group_id, reason in self.dropped.items():
            if group_id in size:
                audit.dropped[reason] += size[group_id]
        audit.balanced = audit.submitted == audit.trained + sum(audit.dropped.values()) + audit.in_flight
        return audit

    def _require_run(self, run_id: str) -> None:
        if not self.opened or self.opened[0].run_id != run_id:
            raise UnknownRunError(f"no run {run_id}")

    def _training(self) -> dict[str, types_pb2.Prompt]:
        return {g: p for g, p in self.prompts.items() if p.purpose == types_pb2.PURPOSE_TRAIN}

    def _live(self) -> list[str]:
        return [g for g in self._training() if g not in self.trained and g not in self.dropped]

    def _mark_trained(self, group_ids, version: int) -> None:
        for group_id in group_ids:
            assert group_id not in self.trained, f"{group_id} was trained twice"
            self.trained[group_id] = version
            self.delivered.pop(group_id, None)
            if group_id in self.ready:
                self.ready.remove(group_id)

    def _next(self, hello: broker_pb2.TrainerHello, room: int) -> list[str]:
        if not self.is_handing_out:
            return []
        if hello.purpose == types_pb2.PURPOSE_TRAIN:
            held = sum(self.prompts[g].purpose == types_pb2.PURPOSE_TRAIN for g in self.delivered)
            room = min(room, self.opened[0].limits.groups_per_step - held)
        ids = [g for g in self.ready if self.prompts[g].purpose == hello.purpose]
        ids = ids[: max(0, min(room, hello.max_groups))]
        for group_id in ids:
            self.ready.remove(group_id)
            self.delivered[group_id] = hello.consumer_id
        return ids

    def _waiting(self) -> broker_pb2.StreamMicrobatchesResponse:
        waiting = broker_pb2.Waiting(reason="scripted: nothing is ready")
        return broker_pb2.StreamMicrobatchesResponse(waiting=waiting)

    async def _read_credits(self, context, credit: list[int]) -> None:
        while True:
            request = await context.read()
            if not isinstance(request, broker_pb2.StreamMicrobatchesRequest):
                return
            credit[0] = max(credit[0], request.credit_total)
