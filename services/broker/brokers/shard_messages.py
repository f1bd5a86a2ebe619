"""Turns what cores and token shards say to each other into messages between brokers, and back, checked."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from penstock.errors import InternalError, InvalidFieldError, require
from penstock.names import check_run_id
from penstock.v1 import shards_pb2, types_pb2
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.ingest.validation import MAX_CHUNKS, MAX_TOKENS_REQUEST_BYTES, check_bytes, check_count, check_id
from services.broker.operations.chunk_rules import Accepted
from services.broker.records.shard_ids import MAX_TOKEN_SHARDS
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.records_pb2 import SampleTail

MAX_SAMPLES = 4_096
"""Samples in one seal or report."""


def check_call(
    request: shards_pb2.AcceptChunksRequest | shards_pb2.SealLeasesRequest | shards_pb2.ReportTailsRequest,
) -> None:
    """Raise InvalidFieldError unless a request names a run and a shard, and has no more than it may."""
    check_run_id(request.run_id)
    shard = request.token_shard
    require(1 <= shard <= MAX_TOKEN_SHARDS, "token_shard", shard, f"1 to {MAX_TOKEN_SHARDS}")
    check_bytes("request", request.ByteSize(), most=MAX_TOKENS_REQUEST_BYTES)
    match request:
        case shards_pb2.AcceptChunksRequest():
            check_id("sender_id", request.sender_id)
            check_count("chunks", len(request.chunks), MAX_CHUNKS)
        case shards_pb2.SealLeasesRequest():
            check_count("leases", len(request.leases), MAX_SAMPLES)
        case shards_pb2.ReportTailsRequest():
            check_count("reports", len(request.reports), MAX_SAMPLES)


def chunk_message(chunk: ChunkFacts) -> types_pb2.TokenChunk:
    """The chunk as its generator sent it."""
    message = types_pb2.TokenChunk.FromString(chunk.payload)
    message.key.CopyFrom(_key(chunk.group_id, chunk.sample_index, chunk.attempt))
    message.lease_id = chunk.lease_id
    if chunk.score is not None:
        message.score.CopyFrom(chunk.score)
    return message


def accepted_response(accepted: Accepted, chunks: Sequence[ChunkFacts]) -> shards_pb2.AcceptChunksResponse:
    """The outcome for chunks."""
    repeated = {id(chunk) for chunk in accepted.repeated}
    numbers = [number for number, chunk in enumerate(chunks) if id(chunk) in repeated] if repeated else []
    return shards_pb2.AcceptChunksResponse(errors=accepted.errors, repeated_chunks=numbers)


def read_accepted(response: shards_pb2.AcceptChunksResponse, chunks: Sequence[ChunkFacts]) -> Accepted:
    """The outcome for chunks that were passed on. Raises InternalError."""
    if any(number >= len(chunks) for number in response.repeated_chunks):
        raise InternalError(f"repeated_chunks: names chunks beyond the {len(chunks)} that were passed on")
    return Accepted(errors=list(response.errors), repeated=[chunks[number] for number in response.repeated_chunks])


def lease_message(sample: SealRequest) -> shards_pb2.EndedLease:
    """A lease to be sealed."""
    key = _key(sample.group_id, sample.sample_index, sample.attempt)
    return shards_pb2.EndedLease(key=key, lease_id=sample.lease_id)


def read_lease(lease: shards_pb2.EndedLease) -> SealRequest:
    """The same. Raises InvalidFieldError."""
    _check_key(lease.key)
    check_id("lease_id", lease.lease_id)
    return SealRequest(
        group_id=lease.key.group_id,
        sample_index=lease.key.sample_index,
        lease_id=lease.lease_id,
        attempt=lease.key.attempt,
    )


def read_tails(tails: Sequence[bytes], num_samples: int) -> list[SampleTail]:
    """The tails of sealed samples. Raises InternalError."""
    if len(tails) != num_samples:
        raise InternalError(f"tails: {len(tails)} of {num_samples} sealed samples")
    try:
        return [SampleTail.FromString(tail) for tail in tails]
    except DecodeError as error:
        raise InternalError(f"tails: {error}") from error


def report_message(report: TailReport) -> shards_pb2.SampleReport:
    """What a shard has of a sample."""
    key = _key(report.group_id, report.sample_index, report.tail.attempt)
    return shards_pb2.SampleReport(key=key, tail=report.tail.SerializeToString(), token_shard=report.token_shard)


def read_report(report: shards_pb2.SampleReport) -> TailReport:
    """The same. Raises InvalidFieldError."""
    _check_key(report.key)
    shard = report.token_shard
    require(shard <= MAX_TOKEN_SHARDS, "reports.token_shard", shard, f"0 to {MAX_TOKEN_SHARDS}")
    try:
        tail = SampleTail.FromString(report.tail)
    except DecodeError as error:
        raise InvalidFieldError(f"tail: {len(report.tail)} bytes that are none: {error}", field="tail") from error
    return TailReport(group_id=report.key.group_id, sample_index=report.key.sample_index, tail=tail, token_shard=shard)


def _key(group_id: str, sample_index: int, attempt: int) -> types_pb2.SampleKey:
    return types_pb2.SampleKey(group_id=group_id, sample_index=sample_index, attempt=attempt)


def _check_key(key: types_pb2.SampleKey) -> None:
    check_id("group_id", key.group_id)
