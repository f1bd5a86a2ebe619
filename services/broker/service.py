"""Implements BrokerService: decodes, calls the core through the run's replica, encodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import grpc
from google.protobuf.duration_pb2 import Duration

from penstock.names import check_run_id
from penstock.network.guard import takes_bytes
from penstock.security.access import current_caller
from penstock.v1 import broker_pb2, broker_pb2_grpc
from penstock.wire.timestamps import timestamp, unix_s
from services.broker.brokers.joining import JoinedBrokers
from services.broker.ingest.validation import (
    MAX_GROUP_IDS,
    MAX_PROMPTS,
    MAX_STEP_RECORDS,
    check_bytes,
    check_count,
    check_reason,
    check_timestamp,
)
from services.broker.operations import agent_sessions, delivery, drops, ownership, submission
from services.broker.rules.limits import duration
from services.broker.runtime import removal
from services.broker.runtime.run_list import list_runs
from services.broker.runtime.run_registry import RunRegistry
from services.broker.runtime.run_replica import RunReplica
from services.broker.stalls import stall_report
from services.broker.state.run_audit import audit_rows, totals
from services.broker.state.run_state import RunState
from services.broker.streams.export_stream import export
from services.broker.streams.lease_stream import LeaseStream
from services.broker.streams.microbatch_stream import MicrobatchStream
from services.broker.streams.request_reader import first_request, wait_for_event
from services.broker.streams.scoring_stream import ScoringStream
from services.broker.streams.token_stream import serve_tokens
from services.broker.streams.trajectory_stream import serve_puts
from services.broker.traces.submitted import mark_sampled, record_submission

RETRY_DELAY = Duration(nanos=200_000_000)
"""How long a client waits before it resends prompts refused by a full queue: a few steps of a small run."""
WATCH_CHECK_S = 5.0

_Context = grpc.aio.ServicerContext[Any, Any]


def _admit_trainer(
    state: RunState,
    request: broker_pb2.CloseRunRequest | broker_pb2.SubmitPromptsRequest | broker_pb2.DropGroupsRequest,
    now_s: float,
) -> None:
    """A trainer's call is refused once another one has taken the run over; other roles may call at any time."""
    if request.HasField("owner"):
        ownership.admit(state, request.owner, now_s)


class BrokerService(broker_pb2_grpc.BrokerServiceServicer):
    """See broker.proto for what each call promises."""

    def __init__(self, run_registry: RunRegistry, brokers: JoinedBrokers | None = None) -> None:
        """`brokers` says who owns cores and token shards; None if this one is alone."""
        self._run_registry = run_registry
        self._shard_maps = None if brokers is None else brokers.shard_maps
        self._membership = None if brokers is None else brokers.membership

    def _replica(self, run_id: str) -> RunReplica:
        """The replica of the run that a request names. Raises InvalidFieldError."""
        check_run_id(run_id)
        return self._run_registry.replica(run_id)

    async def OpenRun(self, request: broker_pb2.OpenRunRequest, context: _Context) -> broker_pb2.OpenRunResponse:
        """Create, re-attach, rewind or catch up; see `lifecycle`."""
        replica = self._replica(request.run_id)
        check_count("steps", len(request.steps), MAX_STEP_RECORDS)
        return await replica.open(request)

    async def CloseRun(self, request: broker_pb2.CloseRunRequest, context: _Context) -> broker_pb2.CloseRunResponse:
        """Mark the run closed, dropping everything in flight if requested; its streams notice."""
        replica = self._replica(request.run_id)
        if request.drop_reason:
            check_reason(request.drop_reason, field="drop_reason")
        closed_s = await replica.store.now_s(request.run_id)

        def operation(state: RunState) -> None:
            _admit_trainer(state, request, replica.clock.now_s())
            if request.drop_reason:
                drops.drop_all(state, request.drop_reason)
                agent_sessions.drop_all(state, request.drop_reason)
            state.run.is_closed, state.run.close_s = True, state.run.close_s or closed_s

        await replica.transact(operation)
        return broker_pb2.CloseRunResponse()

    async def SubmitPrompts(
        self, request: broker_pb2.SubmitPromptsRequest, context: _Context
    ) -> broker_pb2.SubmitPromptsResponse:
        """Queue prompts; see `submission`."""
        replica = self._replica(request.run_id)
        check_count("prompts", len(request.prompts), MAX_PROMPTS)
        check_bytes("prompts", request.ByteSize())
        mark_sampled(request)
        submitted_s = replica.clock.now_s()
        retired = await replica.store.retired(request.run_id, [prompt.group_id for prompt in request.prompts])
        forecasts = await self._run_registry.forecaster.forecasts(request.run_id, request.prompts)

        def operation(state: RunState) -> tuple[broker_pb2.SubmitPromptsResponse, int]:
            _admit_trainer(state, request, replica.clock.now_s())
            num_before = state.run.last_sequence
            errors = submission.submit(
                state, request.prompts, retired=retired, now_s=replica.clock.now_s(), forecasts=forecasts
            )
            num_queued = sum(state.num_waiting(purpose) for purpose in state.index.ready)
            is_full = any(error.reason == "QUEUE_FULL" for error in errors)
            response = broker_pb2.SubmitPromptsResponse(
                errors=errors, num_queued_groups=num_queued, retry_delay=RETRY_DELAY if is_full else None
            )
            return response, state.run.last_sequence - num_before

        response, num_added = await replica.transact(operation)
        record_submission(request, start_s=submitted_s, end_s=replica.clock.now_s())
        invariants = self._run_registry.metrics.invariants
        invariants.duplicates.labels("prompt").inc(len(request.prompts) - len(response.errors) - num_added)
        invariants.refusals.labels("prompts").inc(sum(error.reason == "QUEUE_FULL" for error in response.errors))
        return response

    async def StreamLeases(
        self, request_iterator: AsyncIterator[broker_pb2.StreamLeasesRequest], context: _Context
    ) -> AsyncIterator[broker_pb2.StreamLeasesResponse]:
        """See `lease_stream`."""
        stream = LeaseStream(self._run_registry, await first_request(request_iterator), self._membership)
        async with aclosing(stream.serve(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def StreamTokens(
        self, request_iterator: AsyncIterator[broker_pb2.StreamTokensRequest], context: _Context
    ) -> AsyncIterator[broker_pb2.StreamTokensResponse]:
        """See `token_stream`."""
        async with aclosing(serve_tokens(self._run_registry, request_iterator, self._shard_maps)) as responses:
            async for response in responses:
                yield response

    async def GetShardMap(
        self, request: broker_pb2.GetShardMapRequest, context: _Context
    ) -> broker_pb2.GetShardMapResponse:
        """Who owns the run's token shards."""
        check_run_id(request.run_id)
        shard_map = None if self._shard_maps is None else await self._shard_maps.of(request.run_id)
        return broker_pb2.GetShardMapResponse(shard_map=shard_map)

    async def StreamScoring(
        self, request_iterator: AsyncIterator[broker_pb2.StreamScoringRequest], context: _Context
    ) -> AsyncIterator[broker_pb2.StreamScoringResponse]:
        """See `scoring_stream`."""
        stream = ScoringStream(self._run_registry, await first_request(request_iterator))
        async with aclosing(stream.serve(request_iterator)) as responses:
            async for response in responses:
                yield response

    @takes_bytes
    async def PutTrajectories(
        self, request_iterator: AsyncIterator[broker_pb2.PutTrajectoriesRequest], context: _Context
    ) -> AsyncIterator[broker_pb2.PutTrajectoriesResponse]:
        """See `trajectory_stream`."""
        async with aclosing(
            serve_puts(self._run_registry, cast("AsyncIterator[bytes]", request_iterator))
        ) as responses:
            async for response in responses:
                yield response

    async def StreamMicrobatches(
        self, request_iterator: AsyncIterator[broker_pb2.StreamMicrobatchesRequest], context: _Context
    ) -> AsyncIterator[broker_pb2.StreamMicrobatchesResponse]:
        """Serve a trainer; responses are already serialized, which the server accepts (`penstock.network.guard`)."""
        stream = MicrobatchStream(self._run_registry, await first_request(request_iterator))
        async with aclosing(stream.serve(request_iterator)) as responses:
            async for response in responses:
                yield cast("broker_pb2.StreamMicrobatchesResponse", response)

    async def AckStep(self, request: broker_pb2.AckStepRequest, context: _Context) -> broker_pb2.AckStepResponse:
        """Mark a step trained; see `delivery.acknowledge`."""
        replica = self._replica(request.run_id)
        check_count("group_ids", len(request.group_ids), MAX_GROUP_IDS)

        def operation(state: RunState) -> tuple[broker_pb2.AckStepResponse, bool]:
            ownership.admit(state, request.owner, replica.clock.now_s())
            is_repeated = request.policy_version <= state.run.policy_version
            response = delivery.acknowledge(
                state, request.consumer_id, list(request.group_ids), request.policy_version, replica.clock.now_s()
            )
            return response, is_repeated

        response, is_repeated = await replica.transact(operation)
        self._run_registry.metrics.invariants.duplicates.labels("step").inc(is_repeated)
        return response

    async def DropGroups(
        self, request: broker_pb2.DropGroupsRequest, context: _Context
    ) -> broker_pb2.DropGroupsResponse:
        """Drop groups; see `drops`."""
        replica = self._replica(request.run_id)
        check_reason(request.reason)
        check_count("group_ids", len(request.group_ids), MAX_GROUP_IDS)

        def operation(state: RunState) -> int:
            _admit_trainer(state, request, replica.clock.now_s())
            drops.check_countable(state.run.dropped, request.reason)
            return drops.drop_groups(state, request.group_ids, request.reason)

        num_samples = await replica.transact(operation)
        return broker_pb2.DropGroupsResponse(num_samples=num_samples)

    async def GetRun(self, request: broker_pb2.GetRunRequest, context: _Context) -> broker_pb2.GetRunResponse:
        """One coherent picture, taken from an up-to-date copy."""
        replica = self._replica(request.run_id)
        check_timestamp("busy_since", request.busy_since)
        busy_since_s = unix_s(request.busy_since) if request.HasField("busy_since") else None
        await replica.learn_time()
        generators, _workers = await replica.peers.views(busy_since_s)
        present = replace(replica.peers.present(), generators=generators)
        asked_s = self._run_registry.flush_interval.asked_s

        def operation(state: RunState) -> broker_pb2.GetRunResponse:
            for view in generators:
                view.num_leases = len(state.generation_leases.get(view.hello.generator_id, ()))
            run = state.run
            beat_s = self._run_registry.heartbeat_interval.asked_s(state.limits.generation_lease_s)
            return broker_pb2.GetRunResponse(
                run_id=run.run_id,
                limits=run.limits,
                policy=state.policy.to_proto(),
                policy_version=run.policy_version,
                is_closed=run.is_closed,
                owner=run.owner,
                owner_time=timestamp(run.owner_s) if run.owner_s else None,
                audit=totals(state),
                generators=generators,
                waits=stall_report.waits(state, present, replica.clock.now_s()),
                reward_worker_ids=sorted(present.worker_ids),
                scorer_ids=sorted(present.scorer_ids),
                reward_warnings=replica.peers.reward_warnings(),
                dispatch_state=replica.dispatcher.describe(state, self._run_registry.forecaster.state),
                now_time=timestamp(replica.clock.now_s()),
                flush_interval=duration(asked_s) if asked_s else None,
                heartbeat_interval=duration(beat_s) if beat_s else None,
            )

        return await replica.transact(operation)

    async def ListRuns(self, request: broker_pb2.ListRunsRequest, context: _Context) -> broker_pb2.ListRunsResponse:
        """The runs of the store that the caller may know of, oldest first; see `run_list`."""
        return await list_runs(self._run_registry.store, current_caller().sees_run)

    async def DeleteRun(self, request: broker_pb2.DeleteRunRequest, context: _Context) -> broker_pb2.DeleteRunResponse:
        """Delete a run, or continue deleting it; see `removal`."""
        return await removal.delete(self._replica(request.run_id), is_forced=request.force)

    async def AuditRun(self, request: broker_pb2.AuditRunRequest, context: _Context) -> broker_pb2.AuditRunResponse:
        """The audit, counted now."""
        return broker_pb2.AuditRunResponse(audit=await self._replica(request.run_id).read_books(audit_rows))

    async def WatchPolicy(
        self, request: broker_pb2.WatchPolicyRequest, context: _Context
    ) -> AsyncIterator[broker_pb2.WatchPolicyResponse]:
        """The current version, and again at every change."""
        replica = self._replica(request.run_id)

        def operation(state: RunState) -> tuple[broker_pb2.WatchPolicyResponse, bool]:
            run = state.run
            current = broker_pb2.WatchPolicyResponse(policy_version=run.policy_version, history=run.history)
            return current, run.is_closed

        last: broker_pb2.WatchPolicyResponse | None = None
        with replica.listening() as wake:
            while True:
                self._run_registry.check_serving()
                current, is_closed = await replica.transact(operation, must_verify=last is None)
                if current != last:
                    last = current
                    yield current
                if is_closed:
                    return
                await wait_for_event(wake, WATCH_CHECK_S)

    async def ExportTrajectories(
        self, request: broker_pb2.ExportTrajectoriesRequest, context: _Context
    ) -> AsyncIterator[broker_pb2.ExportTrajectoriesResponse]:
        """Retained steps, and with follow later ones; see `export_stream`."""
        check_run_id(request.run_id)
        async with aclosing(export(self._run_registry, request)) as responses:
            async for response in responses:
                yield response
