"""Serves token streams: chunks in, one answer per request, once stored."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass

from penstock.names import check_run_id
from penstock.process.time_limits import Wake
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
from services.broker.operations.chunk_rules import Accepted
from services.broker.records.shard_ids import MAX_TOKEN_SHARDS
from services.broker.rules.limits import duration
from services.broker.runtime.metrics import BrokerMetrics
from services.broker.runtime.run_registry import RunRegistry
from services.broker.runtime.run_replica import RunReplica
from services.broker.runtime.stream_listeners import Topic
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
) -> AsyncGenerator[broker_pb2.StreamTokensResponse, None]:
    """Answer each request in turn; one commit holds all its chunks.

    An idle stream ends with OK when a run it wrote to is closed, and with UNAVAILABLE when the process drains.
    """
    wake = Wake()
    answers: asyncio.Queue[broker_pb2.StreamTokensResponse] = asyncio.Queue(MAX_UNREAD)
    runs: dict[str, RunReplica] = {}
    flush_interval = run_registry.flush_interval
    hints = ShardHints(shard_maps, run_registry.metrics)
    with ExitStack() as listening:
        listening.enter_context(run_registry.listening(wake))

        async def handle(request: broker_pb2.StreamTokensRequest) -> None:
            with flush_interval.answering(run_registry.clock):
                shard_map = await hints.look(request)
                answer = await accept(run_registry, request)
            if shard_map is not None:
                answer.shard_map.CopyFrom(shard_map)
            if flush_interval.asked_s:
                answer.flush_interval.CopyFrom(duration(flush_interval.asked_s))
            await answers.put(answer)
            if request.run_id not in runs:
                runs[request.run_id] = run_registry.replica(request.run_id)
                listening.enter_context(runs[request.run_id].listening(wake, topic=Topic.END))

        def check() -> bool:
            run_registry.check_serving()
            return any(replica.is_closed for replica in runs.values())

        async with aclosing(answered(requests, handle, answers, wake, check)) as responses:
            async for response in responses:
                yield response


async def accept(run_registry: RunRegistry, request: broker_pb2.StreamTokensRequest) -> broker_pb2.StreamTokensResponse:
    """Store the chunks of one request, each where its sample's tokens are."""
    check_run_id(request.run_id)
    check_id("generator_id", request.generator_id)
    check_count("chunks", len(request.chunks), MAX_CHUNKS)
    check_bytes("chunks", request.ByteSize(), most=MAX_TOKENS_REQUEST_BYTES)
    if any([chunk.token_shard for chunk in request.chunks]):
        parts = [_store(run_registry, request, shard, chunks) for shard, chunks in _by_shard(request.chunks).items()]
        errors = [error for part in await asyncio.gather(*parts) for error in part]
    else:
        errors = await _store(run_registry, request, 0, request.chunks)
    return broker_pb2.StreamTokensResponse(sequence=request.sequence, errors=errors)


def _by_shard(chunks: Sequence[types_pb2.TokenChunk]) -> dict[int, list[types_pb2.TokenChunk]]:
    """Chunks by their token shard, which is not stored with them."""
    parts: dict[int, list[types_pb2.TokenChunk]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.token_shard, []).append(chunk)
        chunk.ClearField("token_shard")
    return parts


async def _store(
    run_registry: RunRegistry,
    request: broker_pb2.StreamTokensRequest,
    shard: int,
    chunks: Sequence[types_pb2.TokenChunk],
) -> list[broker_pb2.ChunkError]:
    """Store chunks of one shard, or of the run itself; returns those that were refused."""
    facts = read_chunks(chunks)
    if shard > MAX_TOKEN_SHARDS:
        return [fact.refuse("INVALID_FIELD", 0, f"token_shard: {shard}; must be what its lease says") for fact in facts]
    keep = _in_shard if shard else _in_run
    outcome = await keep(run_registry, request, shard, facts)
    _count(run_registry.metrics, facts, outcome)
    _report_lengths(run_registry, request.run_id, facts, outcome)
    return outcome.accepted.errors


async def _in_run(
    run_registry: RunRegistry, request: broker_pb2.StreamTokensRequest, _shard: int, chunks: Sequence[ChunkFacts]
) -> _Outcome:
    replica, generator_id = run_registry.replica(request.run_id), request.generator_id

    def operation(state: RunState) -> _Outcome:
        state.check_open()
        accepted = append_tokens.accept_chunks(state, generator_id, chunks, replica.clock.now_s())
        return _Outcome(accepted=accepted, policy_version=state.run.policy_version)

    return await replica.transact(operation)


async def _in_shard(
    run_registry: RunRegistry, request: broker_pb2.StreamTokensRequest, shard: int, chunks: Sequence[ChunkFacts]
) -> _Outcome:
    accepted = await run_registry.shards.accept(request.run_id, shard, request.generator_id, chunks)
    # A hint, for the metrics: the copy of the run may be behind, or not here.
    copy = run_registry.replica(request.run_id).copy
    return _Outcome(accepted=accepted, policy_version=sys.maxsize if copy is None else copy.run.policy_version)


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
