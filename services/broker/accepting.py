"""Decoded tokens into the run. Pure operations on a RunState.

Promise: a chunk is stored only under the current lease, and only where the last one ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.v1 import broker_pb2, types_pb2
from services.broker import drops, generation
from services.broker.chunks import ChunkFacts
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.run_state import RunState

_QUEUED, _LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
_FINISHED = broker_pb2.SAMPLE_STATE_FINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What became of chunks; those that are in neither list are stored."""

    errors: list[broker_pb2.ChunkError]
    """Those that were refused."""
    repeated: list[ChunkFacts]
    """Those that were stored already, sent under the same lease: accepted again without effect."""


def accept_chunks(state: RunState, generator_id: str, chunks: Sequence[ChunkFacts], now_s: float) -> Accepted:
    """Store chunks of any number of samples; those of one sample come in order."""
    accepted = Accepted(errors=[], repeated=[])
    by_group: dict[str, list[ChunkFacts]] = {}
    for chunk in chunks:
        by_group.setdefault(chunk.group_id, []).append(chunk)
    for group_id, members in by_group.items():
        group = state.groups.get(group_id)
        if group is None:
            text = "no such group, or it was dropped"
            accepted.errors.extend(chunk.refuse("UNKNOWN_SAMPLE", 0, text) for chunk in members)
            continue
        fresh: list[ChunkFacts] = []
        for chunk in members:
            (accepted.repeated if _is_known(group, chunk, generator_id) else fresh).append(chunk)
        if all(_refusal(state, group, chunk, generator_id) is not None for chunk in fresh):
            # Nothing is stored, so nothing is committed: who sends nonsense costs no write.
            _store_group(state, group, fresh, generator_id, now_s, accepted)
            continue
        is_end = any(chunk.finish_reason for chunk in fresh)
        with state.edit(group_id) if is_end else state.grow(group_id):
            _store_group(state, group, fresh, generator_id, now_s, accepted)
            if is_end:
                drops.close_group(state, group, now_s)
    return accepted


def _store_group(
    state: RunState,
    group: GroupRecord,
    chunks: Sequence[ChunkFacts],
    generator_id: str,
    now_s: float,
    accepted: Accepted,
) -> None:
    for chunk in chunks:
        refusal = _refusal(state, group, chunk, generator_id)
        if refusal is None:
            _store(state, group, chunk, now_s)
        else:
            accepted.errors.append(refusal)


def _is_known(group: GroupRecord, chunk: ChunkFacts, generator_id: str) -> bool:
    """Whether the chunk is a repetition of what is stored already, sent under the same lease."""
    if chunk.sample_index >= len(group.samples):
        return False
    sample = group.samples[chunk.sample_index]
    if (sample.lease_id, sample.generator_id) != (chunk.lease_id, generator_id):
        return False
    if sample.state == _LEASED:
        return chunk.end <= sample.num_tokens and chunk.num_tokens > 0 and not chunk.finish_reason
    was_aborted = chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED
    return (
        sample.state not in (_QUEUED, broker_pb2.SAMPLE_STATE_DROPPED) or was_aborted
    ) and chunk.end <= sample.num_tokens


def _refusal(state: RunState, group: GroupRecord, chunk: ChunkFacts, generator_id: str) -> broker_pb2.ChunkError | None:
    """Why a chunk cannot be stored; None when it can."""
    if chunk.sample_index >= len(group.samples):
        return chunk.refuse("UNKNOWN_SAMPLE", 0, f"the group has {len(group.samples)} samples")
    sample = group.samples[chunk.sample_index]
    if sample.state != _LEASED or (sample.lease_id, sample.generator_id) != (chunk.lease_id, generator_id):
        return chunk.refuse("LEASE_LOST", sample.num_tokens, "the lease expired or was revoked")
    if chunk.offset != sample.num_tokens:
        return chunk.refuse("OFFSET_MISMATCH", sample.num_tokens, f"{sample.num_tokens} tokens are stored")
    fault = chunk.fault or _fault(state, chunk)
    if fault:
        return chunk.refuse("INVALID_FIELD", sample.num_tokens, fault)
    return None


def _store(state: RunState, group: GroupRecord, chunk: ChunkFacts, now_s: float) -> None:
    sample = group.samples[chunk.sample_index]
    if chunk.num_tokens or chunk.finish_reason in (
        types_pb2.FINISH_REASON_STOP,
        types_pb2.FINISH_REASON_LENGTH,
    ):
        state.append((group.group_id, chunk.sample_index), chunk.payload)
    _add_tokens(sample, chunk)
    sample.last_chunk_s = now_s
    if chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED:
        generation.requeue(state, group, chunk.sample_index)
    elif chunk.finish_reason:
        sample.state, sample.finish_reason, sample.finish_s = _FINISHED, chunk.finish_reason, now_s


def _fault(state: RunState, chunk: ChunkFacts) -> str:
    limit = state.limits.max_completion_tokens
    if chunk.end > limit:
        return f"{chunk.end} completion tokens, but the run allows {limit}"
    if chunk.max_version is not None and chunk.max_version > state.run.policy_version:
        return f"policy version {chunk.max_version} is ahead of the run's {state.run.policy_version}"
    return ""


def _add_tokens(sample: SampleRecord, chunk: ChunkFacts) -> None:
    sample.num_tokens = chunk.end
    if chunk.min_version is None or chunk.max_version is None:
        return
    known_min = sample.min_version if sample.HasField("min_version") else chunk.min_version
    known_max = sample.max_version if sample.HasField("max_version") else chunk.max_version
    sample.min_version, sample.max_version = (
        min(known_min, chunk.min_version),
        max(known_max, chunk.max_version),
    )
