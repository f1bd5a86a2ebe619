"""Appends decoded tokens to the run, by the rules of `chunk_rules`. Pure operations on a RunState."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.v1 import broker_pb2, types_pb2
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations import drops, leasing, scores
from services.broker.operations.chunk_rules import Accepted, ChunkRules, routed_prompt_tokens
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.state.run_state import RunState

_FINISHED = broker_pb2.SAMPLE_STATE_FINISHED
_ENDS = frozenset((types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH))


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
        self._state, self._now_s = state, now_s
        self._rules = ChunkRules(
            generator_id,
            max_completion_tokens=state.limits.max_completion_tokens,
            policy_version=state.run.policy_version,
            routing=state.limits.routing,
            has_environment=state.policy.has_environment,
        )
        self._refuse, self.accepted = self._rules.refuse, self._rules.accepted

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
        is_welcome = self._rules.is_welcome(
            chunk,
            sample.lease_id,
            sample.generator_id,
            sample.state,
            sample.num_tokens,
            num_prompt_tokens=routed_prompt_tokens(group),
        )
        return sample if is_welcome else None


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
        if chunk.score is not None:
            scores.store_score(state, group, chunk.sample_index, chunk.score, now_s)
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
