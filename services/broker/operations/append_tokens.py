"""Appends decoded tokens to the run. Pure operations on a RunState.

Promise: a chunk is stored only under the current lease, and only if it continues where the last one ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.v1 import broker_pb2, types_pb2
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations import drops, leasing
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.state.run_state import RunState

_QUEUED, _LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
_FINISHED = broker_pb2.SAMPLE_STATE_FINISHED
_ENDS = frozenset((types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The outcome for chunks; those in neither list are stored."""

    errors: list[broker_pb2.ChunkError]
    """The chunks that were refused."""
    repeated: list[ChunkFacts]
    """Chunks already stored under the same lease: accepted again without effect."""


def accept_chunks(state: RunState, generator_id: str, chunks: Sequence[ChunkFacts], now_s: float) -> Accepted:
    """Store chunks of any number of samples; those of one sample come in order."""
    acceptance = _Acceptance(state, generator_id, now_s)
    by_group: dict[str, list[ChunkFacts]] = {}
    for chunk in chunks:
        by_group.setdefault(chunk.group_id, []).append(chunk)
    for group_id, members in by_group.items():
        acceptance.add(group_id, members)
    return acceptance.accepted


class _Acceptance:
    """Stores one generator's chunks group by group."""

    def __init__(self, state: RunState, generator_id: str, now_s: float) -> None:
        self._state, self._generator_id, self._now_s = state, generator_id, now_s
        self._max_tokens, self._policy_version = state.limits.max_completion_tokens, state.run.policy_version
        self.accepted = Accepted(errors=[], repeated=[])

    def add(self, group_id: str, chunks: Sequence[ChunkFacts]) -> None:
        """Store chunks of one group. If none is valid, the record is unchanged: invalid chunks cost no write."""
        group = self._state.groups.get(group_id)
        if group is None or group.HasField("put"):
            for chunk in chunks:
                self._refuse(chunk, "UNKNOWN_SAMPLE", 0, "no such group, or it was dropped")
            return
        if group.token_shard:
            for chunk in chunks:
                self._refuse(chunk, "INVALID_FIELD", 0, f"token_shard: 0; its lease says {group.token_shard}")
            return
        for start, chunk in enumerate(chunks):
            sample = self._sample_of(group, chunk)
            if sample is not None:
                self._store_welcome(group, sample, chunks[start:])
                return

    def _store_welcome(self, group: GroupRecord, sample: SampleRecord, chunks: Sequence[ChunkFacts]) -> None:
        """Store the first chunk, which is `sample`'s, and those after it that are welcome, too."""
        if any([chunk.finish_reason for chunk in chunks]):
            with self._state.edit(group.group_id):
                self._store_all(group, sample, chunks)
                drops.close_group(self._state, group)
        else:
            self._state.grow(group.group_id)
            self._store_all(group, sample, chunks)

    def _store_all(self, group: GroupRecord, sample: SampleRecord, chunks: Sequence[ChunkFacts]) -> None:
        num_bytes = _store(self._state, group, chunks[0], sample, self._now_s)
        for chunk in chunks[1:]:
            following = self._sample_of(group, chunk)
            if following is not None:
                num_bytes += _store(self._state, group, chunk, following, self._now_s)
        self._state.index.grow(group.group_id, num_bytes)

    def _sample_of(self, group: GroupRecord, chunk: ChunkFacts) -> SampleRecord | None:
        """The sample that a chunk continues; None if it is not to be stored, with the reason in `accepted`."""
        samples = group.samples
        if chunk.sample_index >= len(samples):
            self._refuse(chunk, "UNKNOWN_SAMPLE", 0, f"the group has {len(samples)} samples")
            return None
        sample = samples[chunk.sample_index]
        num_tokens, sample_state = sample.num_tokens, sample.state
        is_held = sample.lease_id == chunk.lease_id and sample.generator_id == self._generator_id
        is_next = is_held and sample_state == _LEASED and chunk.offset == num_tokens
        if is_next and chunk.num_tokens and not (chunk.fault or self._fault(chunk)):
            # The common case: tokens of a sample that goes on. The code below handles any.
            return sample
        if is_held and _is_stored(sample_state, num_tokens, chunk):
            self.accepted.repeated.append(chunk)
        elif not is_held or sample_state != _LEASED:
            self._refuse(chunk, "LEASE_LOST", num_tokens, "the lease expired or was revoked")
        elif chunk.offset != num_tokens:
            self._refuse(chunk, "OFFSET_MISMATCH", num_tokens, f"{num_tokens} tokens are stored")
        elif fault := chunk.fault or self._fault(chunk):
            self._refuse(chunk, "INVALID_FIELD", num_tokens, fault)
        else:
            return sample
        return None

    def _fault(self, chunk: ChunkFacts) -> str:
        if chunk.end > self._max_tokens:
            return f"{chunk.end} completion tokens, but the run allows {self._max_tokens}"
        if chunk.max_version is not None and chunk.max_version > self._policy_version:
            return f"policy version {chunk.max_version} is ahead of the run's {self._policy_version}"
        return ""

    def _refuse(self, chunk: ChunkFacts, reason: str, next_offset: int, message: str) -> None:
        self.accepted.errors.append(chunk.refuse(reason, next_offset, message))


def _is_stored(sample_state: broker_pb2.SampleState.ValueType, num_tokens: int, chunk: ChunkFacts) -> bool:
    """Whether a chunk from the sample's lease holder is a repetition; `num_tokens` are stored already."""
    if chunk.end > num_tokens:
        return False
    if sample_state == _LEASED:
        return chunk.num_tokens > 0 and not chunk.finish_reason
    was_aborted = chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED
    return was_aborted or sample_state not in (_QUEUED, broker_pb2.SAMPLE_STATE_DROPPED)


def _store(state: RunState, group: GroupRecord, chunk: ChunkFacts, sample: SampleRecord, now_s: float) -> int:
    """Store a chunk; returns the bytes that it takes."""
    reason, num_bytes = chunk.finish_reason, 0
    if chunk.num_tokens or reason in _ENDS:
        num_bytes = len(chunk.payload)
        state.append((chunk.group_id, chunk.sample_index), chunk.payload)
        sample.stored_bytes += num_bytes
    if chunk.num_tokens:
        sample.num_tokens = chunk.end
        _note_versions(state, sample, chunk)
    sample.last_chunk_s = now_s
    if reason == types_pb2.FINISH_REASON_ABORTED:
        leasing.requeue(state, group, chunk.sample_index)
    elif reason:
        sample.state, sample.finish_reason, sample.finish_s = _FINISHED, reason, now_s
    return num_bytes


def _note_versions(state: RunState, sample: SampleRecord, chunk: ChunkFacts) -> None:
    oldest, newest = chunk.min_version, chunk.max_version
    if oldest is None or newest is None:
        return
    has_versions = sample.HasField("min_version")
    if not has_versions or oldest < sample.min_version:
        sample.min_version = oldest
        state.lower_version(chunk.group_id, oldest)
    if not has_versions or newest > sample.max_version:
        sample.max_version = newest
