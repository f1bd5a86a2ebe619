"""Accepts chunks into a token shard. Pure operations on a ShardState.

Promise: as in the run itself (`chunk_rules`), a chunk is stored only under the current lease, and only if it continues
where the last one ended. Leases are granted by the run, so the first chunk under one makes the shard look there, and
*adopt* it: from then on the shard alone decides, until the lease is sealed.

A lease is adopted only if it comes after what the shard knows: the leases of a sample are numbered in their ids. So
what is read from the run late, or by a broker that owns the shard no more, never brings an older lease back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.v1 import broker_pb2
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations.chunk_rules import Accepted, ChunkRules, routed_prompt_tokens
from services.broker.records.store import SampleId
from services.broker.records.token_tails import TailReport
from services.broker.records_pb2 import GroupRecord, SampleRecord, SampleTail
from services.broker.shards.run_facts import RunFacts
from services.broker.shards.shard_state import ShardState, copied, is_complete, is_unreported

_QUEUED, _LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
_FINISHED = broker_pb2.SAMPLE_STATE_FINISHED


@dataclass(slots=True)
class Answer:
    """What became of chunks."""

    accepted: Accepted
    unknown: list[ChunkFacts] = field(default_factory=list)
    """Chunks under leases that the shard does not know: neither stored nor refused."""
    ends: list[TailReport] = field(default_factory=list)
    """Samples that they end, or ended before, of which the run may not know; true once the operation is committed."""
    mismatches: list[SampleId] = field(default_factory=list)
    """Samples of which the run and the shard do not have the same number of tokens."""


def accept_chunks(
    state: ShardState,
    shard: int,
    generator_id: str,
    chunks: Sequence[ChunkFacts],
    *,
    facts: RunFacts,
    now_s: float,
    records: Mapping[str, GroupRecord | None] | None = None,
) -> Answer:
    """Store chunks of any number of samples; those of one sample come in order.

    `records` are the run's records of the groups, read after the chunks came. Without them, chunks under leases that
    the shard does not know are left over.
    """
    rules = ChunkRules(
        generator_id,
        max_completion_tokens=facts.max_completion_tokens,
        policy_version=facts.policy_version,
        routing=facts.routing,
        has_environment=facts.has_environment,
    )
    answer = Answer(accepted=rules.accepted)
    for chunk in chunks:
        sample = chunk.group_id, chunk.sample_index
        tail = state.tail(sample)
        if tail is None or tail.lease_id != chunk.lease_id:
            if records is None:
                answer.unknown.append(chunk)
                continue
            group = records.get(chunk.group_id)
            leased = _leased(rules, shard, group, chunk)
            if group is None or leased is None:
                continue
            num_prompt_tokens = routed_prompt_tokens(group) if facts.routing is not None else 0
            if not _is_adoptable(tail, leased, generator_id, chunk, answer):
                _refuse_by_run(rules, chunk, leased, num_prompt_tokens)
                continue
            tail = _adopt(state, sample, leased, num_prompt_tokens)
        if _is_welcome(rules, chunk, tail):
            _store(state, sample, tail, chunk, now_s)
        if chunk.finish_reason and is_unreported(tail):
            answer.ends.append(TailReport(group_id=chunk.group_id, sample_index=chunk.sample_index, tail=copied(tail)))
    return answer


def lease_order(attempt: int, lease_id: str) -> tuple[int, int]:
    """The place of a lease among all of its sample; see `leasing.lease_sample` for its id."""
    parts = lease_id.split(".")
    number = parts[2].rpartition("_")[2] if len(parts) > 2 else ""
    return attempt, int(number) if number.isdecimal() else 0


def _leased(rules: ChunkRules, shard: int, group: GroupRecord | None, chunk: ChunkFacts) -> SampleRecord | None:
    """The sample as the run has it; None if the chunk is refused, for it is none of this shard's."""
    if group is None or group.HasField("put"):
        rules.refuse(chunk, "UNKNOWN_SAMPLE", 0, "no such group, or it was dropped")
    elif group.token_shard != shard:
        rules.refuse(chunk, "INVALID_FIELD", 0, f"token_shard: {shard}; its lease says {group.token_shard}")
    elif chunk.sample_index >= len(group.samples):
        rules.refuse(chunk, "UNKNOWN_SAMPLE", 0, f"the group has {len(group.samples)} samples")
    else:
        return group.samples[chunk.sample_index]
    return None


def _is_adoptable(
    tail: SampleTail | None, leased: SampleRecord, generator_id: str, chunk: ChunkFacts, answer: Answer
) -> bool:
    """Whether a chunk comes under the run's lease, and that one continues what the shard has."""
    if leased.state != _LEASED or leased.generator_id != generator_id or leased.lease_id != chunk.lease_id:
        return False
    num_tokens = 0
    if tail is not None:
        if lease_order(leased.attempt, leased.lease_id) < lease_order(tail.attempt, tail.lease_id):
            return False
        if tail.attempt == leased.attempt:
            if is_complete(tail):
                return False
            num_tokens = tail.num_tokens
    if leased.num_tokens != num_tokens:
        answer.mismatches.append((chunk.group_id, chunk.sample_index))
        return False
    return True


def _refuse_by_run(rules: ChunkRules, chunk: ChunkFacts, leased: SampleRecord, num_prompt_tokens: int) -> None:
    """Refuse a chunk, or recognise it as a repetition, by what the run has of its sample."""
    # A lease that is not adopted is as good as lost.
    sample_state = _QUEUED if leased.state == _LEASED else leased.state
    rules.is_welcome(
        chunk,
        leased.lease_id,
        leased.generator_id,
        sample_state,
        leased.num_tokens,
        num_prompt_tokens=num_prompt_tokens,
    )


def _adopt(state: ShardState, sample: SampleId, leased: SampleRecord, num_prompt_tokens: int) -> SampleTail:
    tails = state.edit(sample).tails
    old = tails.get(sample[1])
    if old is None or old.attempt != leased.attempt:
        state.clear(sample)
        tails[sample[1]].CopyFrom(SampleTail(attempt=leased.attempt))
    tail = tails[sample[1]]
    tail.lease_id, tail.generator_id = leased.lease_id, leased.generator_id
    tail.num_prompt_tokens = num_prompt_tokens
    tail.is_sealed = tail.is_reported = False
    tail.ClearField("finish_reason")
    tail.ClearField("score")
    state.ended.discard(sample)
    return tail


def _is_welcome(rules: ChunkRules, chunk: ChunkFacts, tail: SampleTail) -> bool:
    sample_state = _LEASED
    if tail.is_sealed:
        sample_state = _FINISHED if is_complete(tail) else _QUEUED
    return rules.is_welcome(
        chunk,
        tail.lease_id,
        tail.generator_id,
        sample_state,
        tail.num_tokens,
        num_prompt_tokens=tail.num_prompt_tokens,
    )


def _store(state: ShardState, sample: SampleId, tail: SampleTail, chunk: ChunkFacts, now_s: float) -> None:
    state.grow(sample[0])
    if chunk.finish_reason:
        tail.finish_reason, tail.is_sealed, tail.is_reported = chunk.finish_reason, True, False
        if chunk.score is not None:
            tail.score.CopyFrom(chunk.score)
        state.ended.add(sample)
    else:
        state.grown.add(sample)
    if chunk.num_tokens or is_complete(tail):
        state.append(sample, chunk.payload)
        tail.stored_bytes += len(chunk.payload)
    tail.num_tokens, tail.last_chunk_s = chunk.end, now_s
    oldest, newest = chunk.min_version, chunk.max_version
    if oldest is None or newest is None:
        return
    has_versions = tail.HasField("min_version")
    if not has_versions or oldest < tail.min_version:
        tail.min_version = oldest
    if not has_versions or newest > tail.max_version:
        tail.max_version = newest
