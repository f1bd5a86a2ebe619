"""Serves token streams: chunks in, one answer per request, once stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from penstock.names import check_run_id
from penstock.v1 import broker_pb2, types_pb2
from services.broker.brokers.shard_maps import ShardMaps
from services.broker.ingest.token_chunk import ChunkFacts, read_chunks
from services.broker.ingest.validation import (
    MAX_CHUNKS,
    MAX_TOKENS_REQUEST_BYTES,
    check_bytes,
    check_count,
    check_id,
)
from services.broker.operations import append_tokens
from services.broker.operations.append_tokens import Accepted
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.runtime.run_registry import RunRegistry
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.run_state import RunState
from services.broker.streams.request_reader import answered
from services.broker.streams.shard_hints import ShardHints

MAX_UNREAD = 64
"""Answers that wait unread; then the client's requests are not read either."""
_FINISHED = frozenset((types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH))


async def serve_tokens(
    run_registry: RunRegistry,
    requests: AsyncIterator[broker_pb2.StreamTokensRequest],
    shard_maps: ShardMaps | None = None,
) -> AsyncIterator[broker_pb2.StreamTokensResponse]:
    """Answer each request in turn; one commit holds all its chunks.

    An idle stream ends with OK when a run it wrote to is closed, and with UNAVAILABLE when the process drains.
    """
    wake = asyncio.Event()
    answers: asyncio.Queue[broker_pb2.StreamTokensResponse] = asyncio.Queue(MAX_UNREAD)
    runs: dict[str, RunReplica] = {}
    hints = ShardHints(shard_maps, run_registry.metrics)
    with ExitStack() as listening:
        listening.enter_context(run_registry.listening(wake))

        async def handle(request: broker_pb2.StreamTokensRequest) -> None:
            shard_map = await hints.look(request)
            answer = await accept(run_registry, request)
            if shard_map is not None:
                answer.shard_map.CopyFrom(shard_map)
            await answers.put(answer)
            if request.run_id not in runs:
                runs[request.run_id] = run_registry.replica(request.run_id)
                listening.enter_context(runs[request.run_id].listening(wake, only_end=True))

        def check() -> bool:
            run_registry.check_serving()
            return any(replica.is_closed for replica in runs.values())

        async with aclosing(answered(requests, handle, answers, wake, check)) as responses:
            async for response in responses:
                yield response


async def accept(run_registry: RunRegistry, request: broker_pb2.StreamTokensRequest) -> broker_pb2.StreamTokensResponse:
    """Store the chunks of one request."""
    check_run_id(request.run_id)
    check_id("generator_id", request.generator_id)
    check_count("chunks", len(request.chunks), MAX_CHUNKS)
    check_bytes("chunks", request.ByteSize(), most=MAX_TOKENS_REQUEST_BYTES)
    replica = run_registry.replica(request.run_id)
    generator_id = request.generator_id
    chunks = read_chunks(request.chunks)

    def operation(state: RunState) -> _Outcome:
        state.check_open()
        accepted = append_tokens.accept_chunks(state, generator_id, chunks, replica.clock.now_s())
        return _Outcome(accepted=accepted, policy_version=state.run.policy_version)

    outcome = await replica.transact(operation)
    _count(run_registry.metrics, chunks, outcome)
    _report_lengths(run_registry, request.run_id, chunks, outcome)
    return broker_pb2.StreamTokensResponse(sequence=request.sequence, errors=outcome.accepted.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    accepted: Accepted
    policy_version: int


def _report_lengths(run_registry: RunRegistry, run_id: str, chunks: Sequence[ChunkFacts], outcome: _Outcome) -> None:
    """Note the lengths of the samples that this request finished, each once."""
    finished = [chunk for chunk in chunks if chunk.finish_reason in _FINISHED]
    if not finished:
        return
    passed_over = {(error.key.group_id, error.key.sample_index, error.lease_id) for error in outcome.accepted.errors}
    passed_over |= {(chunk.group_id, chunk.sample_index, chunk.lease_id) for chunk in outcome.accepted.repeated}
    for chunk in finished:
        if (chunk.group_id, chunk.sample_index, chunk.lease_id) not in passed_over:
            run_registry.length_reporter.note(run_id, chunk.group_id, chunk.end)


def _count(metrics: BrokerMetrics, chunks: Sequence[ChunkFacts], outcome: _Outcome) -> None:
    """Record the outcome of a request's chunks in the metrics."""
    if not outcome.accepted.errors and not outcome.accepted.repeated:
        # The common case.
        metrics.tokens.inc(sum(chunk.num_tokens for chunk in chunks))
        return
    invariants = metrics.invariants
    invariants.duplicates.labels("chunk").inc(len(outcome.accepted.repeated))
    reasons = {
        (error.key.group_id, error.key.sample_index, error.lease_id): error.reason for error in outcome.accepted.errors
    }
    num_stored = -sum(chunk.num_tokens for chunk in outcome.accepted.repeated)
    for chunk in chunks:
        reason = reasons.get((chunk.group_id, chunk.sample_index, chunk.lease_id))
        if reason is None:
            num_stored += chunk.num_tokens
            continue
        metrics.refused.labels(reason).inc()
        if reason in ("OFFSET_MISMATCH", "LEASE_LOST"):
            invariants.refused_tokens.labels(reason).inc(chunk.num_tokens)
        elif chunk.max_version is not None and chunk.max_version > outcome.policy_version:
            invariants.unattested.inc()
    metrics.tokens.inc(max(0, num_stored))
