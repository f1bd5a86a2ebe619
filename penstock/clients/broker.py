"""Makes typed unary calls to a broker, each with a deadline and retries.

A broker or its Redis may be away at any time and for any duration: calls that fail with a retryable error (draining,
Redis away, deadline) are repeated with back-off, indefinitely unless `patience_s` is set. That is safe: every call here
is idempotent on the ids it carries.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, TypeVar

import grpc

from penstock.clients.export import StepExport
from penstock.clients.prompts import submit_all
from penstock.clients.training import MicrobatchSession
from penstock.clients.trajectories import TrajectorySession
from penstock.network.connection import Connection
from penstock.network.outage import Outage
from penstock.network.rpc import DEFAULT_TIMEOUT_S, call_with_retry
from penstock.security import NO_SECURITY, Security
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.timestamps import timestamp

MAX_GROUP_IDS_PER_CALL = 1024

_Response = TypeVar("_Response")


class TrainedGroup(NamedTuple):
    """A group, and the step that trained it."""

    group: types_pb2.TrajectoryGroup
    policy_version: int
    """The version that the step produced."""


class BrokerClient(Connection):
    """A broker. Every method raises the PenstockError that the broker raised.

    A trainer sets `owner` once it has taken over its run. Calls that only the run's trainer may make then carry it, and
    raise FencedError once another trainer has taken over the run.

    Args:
        target: The broker's address, host:port, or several separated by commas; or a channel, which the client closes.
        security: Certificates and token, if `target` is an address.
        patience_s: How long each call waits for a broker that is away; None waits indefinitely.
        timeout_s: How long each attempt at a call may take.
        on_outage: Called now and then while calls wait, with a line giving the reason; with an empty line afterwards.
    """

    def __init__(
        self,
        target: str | grpc.aio.Channel,
        *,
        security: Security = NO_SECURITY,
        patience_s: float | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_outage: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(target, security=security)
        self.outage = Outage(self.peer, on_notice=on_outage)
        """Whether the broker is away, judged by this client's calls."""
        self._stub = broker_pb2_grpc.BrokerServiceStub(self.channel)
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self.owner: broker_pb2.RunOwner | None = None

    async def open_run(
        self,
        run_id: str,
        *,
        limits: broker_pb2.RunLimits,
        policy_version: int,
        policy: broker_pb2.RunPolicy | None = None,
        steps: Sequence[broker_pb2.StepRecord] = (),
        takes_over: bool = False,
        resumes: broker_pb2.RunOwner | None = None,
    ) -> broker_pb2.OpenRunResponse:
        """Create the run, or attach to it again; no policy means all defaults.

        Args:
            run_id: Names the run.
            limits: Its limits.
            policy_version: The caller's version; only with `takes_over` may it be older than the run's.
            policy: The run's sample policy.
            steps: The caller's last steps, newest last.
            takes_over: Become the run's trainer, as `self.owner`, and fence the previous one.
            resumes: Take over only if no other trainer has done so since this owner did.

        Raises:
            OtherInstanceError: another run was opened under this id.
            FencedError: another trainer has taken over the run.
            RunConflictError: the run exists with other limits or another policy.
        """
        request = broker_pb2.OpenRunRequest(
            run_id=run_id,
            limits=limits,
            policy=policy,
            policy_version=policy_version,
            steps=steps,
            owner=self.owner,
            takes_over=takes_over,
            resumes=resumes,
        )
        return await self._call(self._stub.OpenRun, request)

    async def close_run(self, run_id: str, *, drop_reason: str = "") -> None:
        """End the run: no more leases, and its streams end; groups in flight are dropped if a reason is given."""
        request = broker_pb2.CloseRunRequest(run_id=run_id, drop_reason=drop_reason, owner=self.owner)
        await self._call(self._stub.CloseRun, request)

    def producer(self, run_id: str, producer_id: str = "") -> TrajectorySession:
        """Puts finished groups into a run, while it is entered as a context manager.

        Args:
            run_id: Which run.
            producer_id: Names the producer, 1 to 128 characters; random if empty.
        """
        producer_id = producer_id or f"producer-{secrets.token_hex(6)}"
        return TrajectorySession(self, run_id=run_id, producer_id=producer_id)

    def consumer(
        self,
        run_id: str,
        consumer_id: str,
        *,
        purpose: types_pb2.Purpose.ValueType = types_pb2.PURPOSE_TRAIN,
        max_groups: int = 8,
        max_held_groups: int = 64,
    ) -> MicrobatchSession:
        """Follows a run's microbatches, while it is entered as a context manager.

        Args:
            run_id: Which run.
            consumer_id: Names the consumer; stable across restarts, so that its unacknowledged groups are sent again.
            purpose: Training groups, or evaluation results.
            max_groups: Most groups in one microbatch, >= 1.
            max_held_groups: Most groups received and not acknowledged, >= 1.
        """
        hello = broker_pb2.TrainerHello(
            run_id=run_id, consumer_id=consumer_id, purpose=purpose, max_groups=max_groups, owner=self.owner
        )
        return MicrobatchSession(self, hello, max_held_groups=max_held_groups)

    async def submit(self, run_id: str, prompts: Sequence[types_pb2.Prompt]) -> None:
        """Submit any number of prompts; returns once the broker has all of them, however long its queue is full.

        Fields that a prompt leaves unset (purpose, group size, most tokens) are filled in from the run.

        Raises:
            RefusedError: The broker refused a prompt for good; the earlier ones are submitted.
        """
        limits = (await self.get_run(run_id)).limits
        for prompt in prompts:
            prompt.purpose = prompt.purpose or types_pb2.PURPOSE_TRAIN
            prompt.group_size = prompt.group_size or limits.group_size
            prompt.sampling.max_new_tokens = prompt.sampling.max_new_tokens or limits.max_completion_tokens
        await submit_all(partial(self.submit_prompts, run_id), prompts)

    async def submit_prompts(
        self, run_id: str, prompts: Sequence[types_pb2.Prompt]
    ) -> broker_pb2.SubmitPromptsResponse:
        """Queue prompts, as many as fit in one call (`submit` takes any number); returns per-item errors."""
        request = broker_pb2.SubmitPromptsRequest(run_id=run_id, prompts=prompts, owner=self.owner)
        return await self._call(self._stub.SubmitPrompts, request)

    async def ack_step(
        self, run_id: str, *, consumer_id: str, group_ids: Sequence[str], policy_version: int
    ) -> broker_pb2.AckStepResponse:
        """Mark the groups trained and advance the run to `policy_version`; raises VersionConflictError."""
        request = broker_pb2.AckStepRequest(
            run_id=run_id,
            consumer_id=consumer_id,
            group_ids=group_ids,
            policy_version=policy_version,
            owner=self.owner,
        )
        return await self._call(self._stub.AckStep, request)

    async def drop_groups(self, run_id: str, group_ids: Sequence[str], *, reason: str) -> int:
        """Drop any number of groups; returns the number of samples dropped."""
        num_samples = 0
        for start in range(0, len(group_ids), MAX_GROUP_IDS_PER_CALL):
            part = group_ids[start : start + MAX_GROUP_IDS_PER_CALL]
            request = broker_pb2.DropGroupsRequest(run_id=run_id, group_ids=part, reason=reason, owner=self.owner)
            num_samples += (await self._call(self._stub.DropGroups, request)).num_samples
        return num_samples

    async def get_run(self, run_id: str, *, busy_since_s: float | None = None) -> broker_pb2.GetRunResponse:
        """The state of a run, with generators' busy spans that end after `busy_since_s` (Unix time) if given."""
        request = broker_pb2.GetRunRequest(run_id=run_id)
        if busy_since_s is not None:
            request.busy_since.CopyFrom(timestamp(busy_since_s))
        return await self._call(self._stub.GetRun, request)

    async def audit(self, run_id: str) -> broker_pb2.Audit:
        """The counters of a run, and whether they balance."""
        response = await self._call(self._stub.AuditRun, broker_pb2.AuditRunRequest(run_id=run_id))
        return response.audit

    async def export(self, run_id: str, *, follow: bool = False) -> AsyncIterator[TrainedGroup]:
        """The groups of every retained step, oldest first; with `follow`, also of new steps until the run is closed."""
        steps = StepExport(self, run_id=run_id, follow=follow, patience_s=self._patience_s)
        async with aclosing(steps.responses()) as responses:
            async for response in responses:
                if response.HasField("group"):
                    yield TrainedGroup(response.group, response.policy_version)

    async def list_runs(self) -> list[str]:
        """Ids of the runs, oldest first."""
        return list((await self._call(self._stub.ListRuns, broker_pb2.ListRunsRequest())).run_ids)

    async def run_summaries(self) -> list[broker_pb2.RunSummary]:
        """The same runs with their state; runs deleted meanwhile are missing."""
        return list((await self._call(self._stub.ListRuns, broker_pb2.ListRunsRequest())).runs)

    async def delete_run(self, run_id: str, *, force: bool = False) -> tuple[bool, int]:
        """Delete a run for good; returns whether it existed, and how many keys and records it had.

        Raises:
            RunConflictError: The run is open and in use, and `force` is not set.
        """
        request = broker_pb2.DeleteRunRequest(run_id=run_id, force=force)
        existed, num_keys = False, 0
        while True:
            response = await self._call(self._stub.DeleteRun, request)
            existed, num_keys = existed or response.existed, num_keys + response.num_keys
            if response.is_complete:
                return existed, num_keys

    async def _call(self, method: Callable[..., Awaitable[_Response]], request: Any) -> _Response:
        return await call_with_retry(
            method,
            request,
            peer=self.peer,
            timeout_s=self._timeout_s,
            give_up_after_s=self._patience_s,
            outage=self.outage,
        )
