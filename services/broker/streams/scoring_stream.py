"""Serves one scoring stream, of a reward worker or a scorer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from penstock.errors import InvalidFieldError, require
from penstock.names import check_run_id
from penstock.process.time_limits import Wake
from penstock.v1 import broker_pb2, reward_pb2, types_pb2
from penstock.wire.mask_runs import mask_runs
from penstock.wire.pieces import batched
from penstock.wire.sampling_rules import temperature_of
from penstock.wire.timestamps import timestamp
from services.broker.assembly.messages import MAX_FRAME_BYTES, prefix_of, sample_key, score_item
from services.broker.ingest.validation import (
    MAX_RESULTS,
    check_bytes,
    check_count,
    check_id,
    check_lease_ids,
    check_text,
)
from services.broker.operations import scores
from services.broker.operations.scores import Receipts, ScoringGrant
from services.broker.records.stored_sample import read_sample
from services.broker.rules.limits import LEASE_SECRET_BYTES, duration
from services.broker.runtime.heartbeats import WorkerNote
from services.broker.runtime.run_registry import RunRegistry
from services.broker.runtime.stream_listeners import Topic
from services.broker.state.queue_entry import REFERENCE, REWARD, num_waiting_for
from services.broker.state.run_state import RunState
from services.broker.streams.request_reader import Intake, signs_during, wait_for_event

IDLE_EVERY_S = 1.0
MAX_SILENCE_S = 3.0
"""The contract promises a sign of life at least every 5 s."""
MAX_LEASES_PER_FRAME = 64
MAX_RECEIPTS = 16_384
"""Once this many wait to be sent, no further results are read: the worker does not read its receipts."""

_Response = broker_pb2.StreamScoringResponse


class ScoringStream:
    """Sends finished samples while the worker has credit, a receipt for every result, and signs of life."""

    def __init__(self, run_registry: RunRegistry, first: broker_pb2.StreamScoringRequest) -> None:
        if not first.HasField("hello"):
            raise InvalidFieldError("hello: must be set in the first message", field="hello")
        check_run_id(first.hello.run_id)
        check_id("hello.worker_id", first.hello.worker_id)
        self._task = first.hello.task or REWARD
        require(self._task in (REWARD, REFERENCE), "hello.task", self._task, "a known ScoringTask")
        self._run_registry = run_registry
        self._first = first
        self._worker_id = first.hello.worker_id
        self._replica = run_registry.replica(first.hello.run_id)
        self._credit_total = 0
        self._num_sent = 0
        self._receipts = Receipts(accepted=[], lost=[])
        self._receipts_taken = asyncio.Event()
        self._wake = Wake()

    async def serve(self, requests: AsyncIterator[broker_pb2.StreamScoringRequest]) -> AsyncGenerator[_Response, None]:
        """All responses, until the run is closed or the client disconnects."""
        async with aclosing(signs_during(self._open(), _Response(), every_s=MAX_SILENCE_S)) as signs:
            async for sign in signs:
                yield sign
        # Loop time, not the clock's: this paces the stream and decides nothing about the run.
        loop = asyncio.get_running_loop()
        spoke_s = loop.time()
        with self._replica.listening(self._wake, topic=Topic.SCORING) as wake:
            await self._replica.attend()
            async with Intake(requests, self._on_request, wake) as intake:
                while True:
                    is_ended = intake.is_ended
                    self._run_registry.check_serving()
                    frames = self._take_receipts() + ([] if is_ended else await self._leases())
                    for frame in frames:
                        yield frame
                    if is_ended or self._replica.is_closed:
                        break
                    if frames:
                        spoke_s = loop.time()
                        continue
                    # Others' commits wake this stream too, many times a second: it must send signs of life all the
                    # same.
                    idle_s = IDLE_EVERY_S * self._run_registry.heartbeat_interval.stretch
                    idle_s = min(idle_s, max(0.0, spoke_s + MAX_SILENCE_S - loop.time()))
                    if not await wait_for_event(wake, idle_s) or loop.time() - spoke_s >= MAX_SILENCE_S:
                        spoke_s = loop.time()
                        await self._replica.peers.see_worker(self._worker_id, task=self._task)
                        yield _Response()
                intake.check()

    async def _open(self) -> None:
        await self._replica.transact(self._check_run)
        await self._take(self._first)

    def _check_run(self, state: RunState) -> None:
        state.check_open()
        require(
            self._task != REFERENCE or state.policy.needs_reference_logprobs,
            "hello.task",
            broker_pb2.ScoringTask.Name(self._task),
            "SCORING_TASK_REWARD: the run asks for no log-probs of a reference (algorithm.reference: service)",
        )

    async def _on_request(self, request: broker_pb2.StreamScoringRequest) -> None:
        if request.HasField("hello"):
            raise InvalidFieldError("hello: set in the first message only", field="hello")
        await self._take(request)

    async def _take(self, request: broker_pb2.StreamScoringRequest) -> None:
        """Process a request's credits, renewals and results."""
        check_count("results", len(request.results), MAX_RESULTS)
        check_lease_ids("active_lease_ids", request.active_lease_ids)
        check_lease_ids("returned_lease_ids", request.returned_lease_ids)
        for result in request.results:
            scores.check_result(result)
        check_bytes("request", request.ByteSize())
        if request.active_lease_ids:
            note = WorkerNote(worker_id=self._worker_id, lease_ids=list(request.active_lease_ids))
            self._replica.heartbeats.note(note)
        self._credit_total = request.credit_total or self._credit_total
        check_text("holding_reason", request.holding_reason)
        check_text("warning", request.warning)
        held = request.holding_reason if request.active_lease_ids else None
        # A new stream may belong to a new process, which has no warnings yet.
        warning = request.warning if request.warning or request.HasField("hello") else None
        await self._replica.peers.see_worker(self._worker_id, task=self._task, holding_reason=held, warning=warning)
        if not request.results and not request.returned_lease_ids:
            return

        def operation(state: RunState) -> Receipts:
            receipts = scores.accept_results(state, self._worker_id, request.results, self._replica.clock.now_s())
            scores.give_back(state, self._worker_id, request.returned_lease_ids)
            receipts.lost.extend(request.returned_lease_ids)
            return receipts

        receipts = await self._replica.transact(operation)
        self._run_registry.metrics.invariants.duplicates.labels("score").inc(receipts.num_repeated)
        self._receipts.accepted.extend(receipts.accepted)
        self._receipts.lost.extend(receipts.lost)
        while len(self._receipts.accepted) + len(self._receipts.lost) >= MAX_RECEIPTS:
            self._receipts_taken.clear()
            self._wake.set()
            await self._receipts_taken.wait()

    def _take_receipts(self) -> list[_Response]:
        receipts, self._receipts = self._receipts, Receipts(accepted=[], lost=[])
        self._receipts_taken.set()
        if not receipts.accepted and not receipts.lost:
            return []
        return [_Response(accepted_lease_ids=receipts.accepted, lost_lease_ids=receipts.lost)]

    async def _leases(self) -> list[_Response]:
        credit = min(self._credit_total - self._num_sent, MAX_LEASES_PER_FRAME)
        state = self._replica.copy
        if credit <= 0 or (state is not None and not num_waiting_for(state.finished, self._task)):
            return []

        def operation(state: RunState) -> list[ScoringGrant]:
            return scores.lease_scoring(
                state,
                self._worker_id,
                max_leases=credit,
                now_s=self._replica.clock.now_s(),
                make_suffix=lambda: secrets.token_hex(LEASE_SECRET_BYTES),
                task=self._task,
            )

        grants = await self._replica.transact(operation, must_verify=False)
        self._num_sent += len(grants)
        self._run_registry.metrics.leases.labels("reference" if self._task == REFERENCE else "scoring").inc(len(grants))
        return await self._encode(grants)

    async def _encode(self, grants: list[ScoringGrant]) -> list[_Response]:
        if not grants:
            return []
        prompts = await self._replica.payloads.prompts([grant.sample[0] for grant in grants])
        stored = await self._replica.chunks([grant.sample for grant in grants], [grant.token_shard for grant in grants])
        leases: list[broker_pb2.ScoringLease] = []
        for grant, parts in zip(grants, stored, strict=True):
            if (prompt := prompts.get(grant.sample[0])) is not None:
                lease = broker_pb2.ScoringLease(
                    lease_id=grant.lease_id,
                    expire_time=timestamp(grant.expire_s),
                    lease_duration=duration(grant.life_s),
                    generator_id=grant.generator_id,
                    traceparent=prompt.traceparent,
                )
                self._add_sample(lease, grant, prompt, parts)
                leases.append(lease)
        frames = batched(leases, broker_pb2.ScoringLease.ByteSize, MAX_FRAME_BYTES)
        return [_Response(leases=members) for members in frames]

    def _add_sample(
        self, lease: broker_pb2.ScoringLease, grant: ScoringGrant, prompt: types_pb2.Prompt, parts: Sequence[bytes]
    ) -> None:
        run_id, key = self._replica.run_id, sample_key(grant.sample, grant.attempt)
        if self._task == REWARD:
            stored = read_sample(parts)
            lease.item.CopyFrom(score_item(run_id, prompt, key, grant.finish_reason, stored))
            if b"\0" in stored.loss_mask:
                lease.loss_mask_runs.extend(mask_runs(stored.loss_mask))
            return
        lease.item.CopyFrom(reward_pb2.ScoreItem(key=key, run_id=run_id, token_ids=prefix_of(parts).token_ids))
        lease.prompt_token_ids, lease.temperature = prompt.token_ids, temperature_of(prompt.sampling)
