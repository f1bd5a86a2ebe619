"""Leases samples to generators. Pure operations on a RunState.

Promises: a sample is leased to one generator at a time; tokens decoded under a lost lease are kept and continued by
the next one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.length_histogram import remaining_tokens
from services.broker.dispatch.situation import Work
from services.broker.operations import drops, renewal
from services.broker.records.store import SampleId
from services.broker.records_pb2 import GroupRecord
from services.broker.rules.admission import AdmissionRule, Verdict, judge_evaluation
from services.broker.state.run_state import RunState

_QUEUED, _LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
_SEALING = broker_pb2.SAMPLE_STATE_SEALING
MAX_GROUPS_SCANNED = 512
"""How far down the queue a generator looks for work that fits it."""
LEFT_TO_OTHERS = "dispatch leaves what is queued to generators that are done with it sooner"
ABANDONED_WEIGHTS = (
    "the generator holds weights from before the run's last rewind, or of another run with this id: it waits until it "
    "has pulled current ones"
)
NO_ROOM = "by what dispatch knows of the generator, its KV cache has no room for one more"
NOTHING_QUEUED = "the queue of prompts is empty: nothing was submitted that is not already out"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorFacts:
    """The properties that decide which work a generator may take."""

    generator_id: str
    policy_version: int
    max_context_tokens: int
    longest_context_tokens: int | None = None
    """Capacity of the largest connected generator: longer work is dropped. None while others may still connect."""
    history: int | None = None
    """The run's history that its weights belong to; None if not given."""
    instance_id: str = ""
    """The instance of the run that its weights belong to; empty if not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A granted lease."""

    lease_id: str
    sample: SampleId
    attempt: int
    num_prefix_tokens: int
    expire_s: float
    life_s: float
    """Its duration from the grant and after each renewal."""
    min_policy_version: int
    token_shard: int
    """Where its tokens go; 0 without shards."""
    predicted_tokens: float | None = None
    """Forecast of the completion's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """Granted leases, or a readable reason why there are none."""

    grants: list[Grant]
    reason: str


def lease(
    state: RunState,
    generator: GeneratorFacts,
    *,
    max_leases: int,
    now_s: float,
    make_suffix: Callable[[], str],
) -> Grants:
    """Lease up to `max_leases` samples to a generator, in order of arrival; `fleet.dealer` chooses among generators.

    `make_suffix` returns random characters for lease ids: two leases of one sample and attempt must differ even
    after the store has lost its last second.
    """
    if state.run.is_closed:
        return Grants(grants=[], reason="the run is closed")
    if holds_abandoned(state, generator):
        return Grants(grants=[], reason=ABANDONED_WEIGHTS)
    grants: list[Grant] = []
    reason = ""
    start = _judge_start(state, generator)
    for rank in state.queue[:MAX_GROUPS_SCANNED]:
        if len(grants) >= max_leases:
            break
        group = state.groups.at(rank[-1])
        if group is None:
            continue
        oldest = state.index.versions.get(group.group_id)
        num_context_tokens = num_context_tokens_of(group)
        if generator.longest_context_tokens is not None and num_context_tokens > generator.longest_context_tokens:
            drops.drop(state, group.group_id, drops.CONTEXT_TOO_LONG)
            continue
        is_start = oldest is None and group.purpose == types_pb2.PURPOSE_TRAIN
        verdict = start
        if start.is_allowed or not is_start:
            verdict = _judge(state, generator, group, oldest, num_context_tokens)
        if not verdict.is_allowed:
            reason = reason or verdict.reason
            continue
        grants += _lease_samples(state, generator, group, max_leases - len(grants), now_s, make_suffix)
        start = _judge_start(state, generator)
    return Grants(grants=grants, reason=reason or NOTHING_QUEUED)


def holds_abandoned(state: RunState, generator: GeneratorFacts) -> bool:
    """Whether the generator's weights predate a rewind, or belong to another run with this id.

    Their version number now means other weights.
    """
    if generator.instance_id not in ("", state.run.owner.instance_id):
        return True
    return generator.history is not None and generator.history < state.run.history


def _judge_start(state: RunState, generator: GeneratorFacts) -> Verdict:
    """Whether the generator may start any training group at all; avoids checking each one in a long queue."""
    return state.admission().judge(generator_version=generator.policy_version)


def work_of(group: GroupRecord, mean_tokens: float) -> Work:
    """The group's queued samples as dispatch sees them."""
    queued = [sample for sample in group.samples if sample.state == _QUEUED]
    num_prefix_tokens = sum(sample.num_tokens for sample in queued) / len(queued)
    length = queued[0].predicted_tokens
    return Work(
        num_samples=len(queued),
        context_tokens=group.num_prompt_tokens + num_prefix_tokens,
        length_tokens=length,
        remaining_tokens=remaining_tokens(length or mean_tokens, num_prefix_tokens),
    )


def num_context_tokens_of(group: GroupRecord) -> int:
    """The smallest capacity, in tokens, that adds at least one token to every queued sample."""
    return (
        group.num_prompt_tokens
        + 1
        + max((sample.num_tokens for sample in group.samples if sample.state == _QUEUED), default=0)
    )


def judge(
    admission: AdmissionRule,
    group: GroupRecord,
    oldest: int | None,
    num_context_tokens: int,
    *,
    policy_version: int,
    max_context_tokens: float,
) -> Verdict:
    """Whether generators of this version and context may take the group's samples.

    `oldest` is the version of a started training group, `num_context_tokens` what `num_context_tokens_of` returns.
    """
    if num_context_tokens > max_context_tokens:
        return Verdict(is_allowed=False, reason=f"the work left needs a context of {num_context_tokens} tokens or more")
    asked = group.prompt_min_version if group.HasField("prompt_min_version") else None
    if group.purpose == types_pb2.PURPOSE_EVALUATE:
        return judge_evaluation(generator_version=policy_version, prompt_min_version=asked)
    return admission.judge(generator_version=policy_version, min_version=oldest, prompt_min_version=asked)


def _judge(
    state: RunState, generator: GeneratorFacts, group: GroupRecord, oldest: int | None, num_context_tokens: int
) -> Verdict:
    return judge(
        state.admission(),
        group,
        oldest,
        num_context_tokens,
        policy_version=generator.policy_version,
        max_context_tokens=generator.max_context_tokens,
    )


def _lease_samples(
    state: RunState,
    generator: GeneratorFacts,
    group: GroupRecord,
    max_leases: int,
    now_s: float,
    make_suffix: Callable[[], str],
) -> list[Grant]:
    with state.edit(group.group_id):
        queued = [index for index, sample in enumerate(group.samples) if sample.state == _QUEUED]
        return [lease_sample(state, generator, group, index, now_s, make_suffix) for index in queued[:max_leases]]


def lease_sample(
    state: RunState,
    generator: GeneratorFacts,
    group: GroupRecord,
    index: int,
    now_s: float,
    make_suffix: Callable[[], str],
) -> Grant:
    """Lease one queued sample, inside an `edit` of its group."""
    sample = group.samples[index]
    if state.policy.token_shards and not group.token_shard:
        group.token_shard = home_shard(generator.generator_id, state.policy.token_shards)
    sample.state = _LEASED
    sample.num_leases += 1
    sample.lease_id = f"{group.sequence}.{index}.{sample.attempt}_{sample.num_leases}.{make_suffix()}"
    sample.generator_id = generator.generator_id
    now_s = renewal.after_last(state, generator.generator_id, now_s)
    sample.lease_version = generator.policy_version
    sample.lease_s, sample.lease_expire_s = now_s, now_s + state.limits.generation_lease_s
    sample.first_lease_s = sample.first_lease_s or now_s
    return Grant(
        lease_id=sample.lease_id,
        sample=(group.group_id, index),
        attempt=sample.attempt,
        num_prefix_tokens=sample.num_tokens,
        expire_s=sample.lease_expire_s,
        life_s=state.limits.generation_lease_s,
        min_policy_version=generator.policy_version,
        token_shard=group.token_shard,
        predicted_tokens=sample.predicted_tokens if sample.HasField("predicted_tokens") else None,
    )


def home_shard(generator_id: str, num_shards: int) -> int:
    """The token shard of groups that this generator is the first to lease: what it sends at once goes to one shard."""
    return zlib.crc32(generator_id.encode()) % num_shards + 1


def may_take(state: RunState, generator: GeneratorFacts, group: GroupRecord, index: int) -> bool:
    """Whether a generator may continue a sample leased to another one."""
    num_context_tokens = group.num_prompt_tokens + group.samples[index].num_tokens + 1
    oldest = state.index.versions.get(group.group_id)
    return _judge(state, generator, group, oldest, num_context_tokens).is_allowed


def expire(state: RunState, now_s: float, *, unbroken_since_s: float = 0.0) -> int:
    """Requeue the samples of expired leases at the front of the queue; returns how many.

    After a gap in the run's clock every lease gets its full duration: heartbeats could not arrive during the gap.
    """
    if now_s - unbroken_since_s < state.limits.generation_lease_s:
        return 0

    def end_s(sample: SampleId) -> float:
        return state.lease_end_s(state.groups[sample[0]].samples[sample[1]])

    renewal.forget_gone(state, now_s)
    late = state.generation_ends.ended(state.generation_leases, end_s, now_s)
    return _end_leases(state, late)


def end_all_of(state: RunState, generator_id: str) -> int:
    """End the leases of a generator whose process has ended; returns how many."""
    held: dict[str, list[int]] = {}
    for group_id, index in state.generation_leases.get(generator_id, {}).values():
        held.setdefault(group_id, []).append(index)
    return _end_leases(state, held)


def _end_leases(state: RunState, samples: Mapping[str, Sequence[int]]) -> int:
    """End the leases of samples, by group; returns how many."""
    for group_id, indices in samples.items():
        with state.edit(group_id) as group:
            for index in indices:
                end_lease(state, group, index)
            drops.close_group(state, group)
    return sum(len(indices) for indices in samples.values())


def end_lease(state: RunState, group: GroupRecord, index: int) -> None:
    """End a sample's lease, inside an `edit` of its group; once all its tokens are counted, it is requeued."""
    if group.token_shard:
        group.samples[index].state = _SEALING
    else:
        requeue(state, group, index)


def requeue(state: RunState, group: GroupRecord, index: int) -> None:
    """Queue a sample whose lease ended, inside an `edit` of its group, unless it had too many leases."""
    sample = group.samples[index]
    if sample.num_leases - sample.num_moves >= state.limits.max_leases_per_sample:
        drops.lose_sample(state, group, index, drops.TOO_MANY_LEASES)
    else:
        sample.state = _QUEUED
