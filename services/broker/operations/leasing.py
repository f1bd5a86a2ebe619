"""Leases to generators. Pure operations on a RunState.

Promises: a sample is leased to one generator at a time; what a lost lease had decoded is kept and continued by the next
one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.fifo import TakeAll
from services.broker.dispatch.length_histogram import remaining_tokens
from services.broker.dispatch.situation import Decision, Order, Work
from services.broker.operations import drops
from services.broker.records.store import SampleId
from services.broker.records_pb2 import GroupRecord
from services.broker.rules.admission import AdmissionRule, Verdict, judge_evaluation
from services.broker.state.run_state import RunState

_QUEUED, _LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
MAX_GROUPS_SCANNED = 512
"""A generator looks no further down the queue than this for work that fits it."""
LEFT_TO_OTHERS = "dispatch leaves what is queued to generators that are done with it sooner"
ABANDONED_WEIGHTS = (
    "the generator holds weights of before the run's last rewind, or of another run of this id: it waits until it has "
    "pulled others"
)
NO_ROOM = "by what dispatch knows of the generator, its KV cache has no room for one more"
NOTHING_QUEUED = "the queue of prompts is empty: nothing was submitted that is not already out"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorFacts:
    """What decides which work a generator may take."""

    generator_id: str
    policy_version: int
    max_context_tokens: int
    longest_context_tokens: int | None
    """The most any connected generator holds: longer work is given up. None while others may still connect."""
    history: int | None = None
    """The run's history its weights belong to; None where it does not say."""
    instance_id: str = ""
    """The instance of the run its weights belong to; empty where it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lease given."""

    lease_id: str
    sample: SampleId
    attempt: int
    num_prefix_tokens: int
    expire_s: float
    life_s: float
    """How long it lasts from then on, and after each renewal."""
    min_policy_version: int
    predicted_tokens: float | None = None
    """Forecast of the completion's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """Leases given, and where there are none, a readable reason."""

    grants: list[Grant]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How dispatch answers the generator that asks."""

    order: Order
    """In which it wants to see the queue."""
    decision: Decision
    mean_tokens: float
    """Length expected of a completion without a forecast."""


EVERYTHING = Choice(order=Order.ARRIVAL, decision=TakeAll(), mean_tokens=1.0)
"""First come, first served."""


def lease(
    state: RunState,
    generator: GeneratorFacts,
    *,
    max_leases: int,
    now_s: float,
    make_suffix: Callable[[], str],
    choice: Choice = EVERYTHING,
) -> Grants:
    """Lease up to `max_leases` samples to a generator: in the queue's order, what dispatch chooses for it.

    `make_suffix` gives random characters for lease ids: after a store that lost its last second, two leases of one
    sample and attempt must still differ.
    """
    if state.run.is_closed:
        return Grants(grants=[], reason="the run is closed")
    if holds_abandoned(state, generator):
        return Grants(grants=[], reason=ABANDONED_WEIGHTS)
    grants: list[Grant] = []
    reason = ""
    start = _judge_start(state, generator)
    for rank in state.queued_in(choice.order)[:MAX_GROUPS_SCANNED]:
        if len(grants) >= max_leases or choice.decision.is_done:
            break
        group = state.groups.at(rank[-1])
        if group is None:
            continue
        oldest = state.index.versions.get(group.group_id)
        num_context_tokens = _num_context_tokens(group)
        if generator.longest_context_tokens is not None and num_context_tokens > generator.longest_context_tokens:
            drops.drop(state, group.group_id, drops.CONTEXT_TOO_LONG)
            continue
        is_start = oldest is None and group.purpose == types_pb2.PURPOSE_TRAIN
        verdict = start
        if start.is_allowed or not is_start:
            verdict = _judge(state.admission(), generator, group, oldest, num_context_tokens)
        if not verdict.is_allowed:
            reason = reason or verdict.reason
            continue
        num_taken = choice.decision.take(_work(group, choice.mean_tokens), max_leases - len(grants))
        if not num_taken:
            reason = reason or LEFT_TO_OTHERS
            continue
        grants += _lease_samples(state, generator, group, num_taken, now_s, make_suffix)
        start = _judge_start(state, generator)
    return Grants(grants=grants, reason=reason or (NO_ROOM if choice.decision.is_done else NOTHING_QUEUED))


def holds_abandoned(state: RunState, generator: GeneratorFacts) -> bool:
    """Whether the generator's weights are of before a rewind, or of another run of this id.

    Their version number means other weights now.
    """
    if generator.instance_id not in ("", state.run.owner.instance_id):
        return True
    return generator.history is not None and generator.history < state.run.history


def _judge_start(state: RunState, generator: GeneratorFacts) -> Verdict:
    """Whether the generator may start any training group at all; spares a look at each of a long queue."""
    return state.admission().judge(
        generator_version=generator.policy_version, min_version=None, prompt_min_version=None
    )


def _work(group: GroupRecord, mean_tokens: float) -> Work:
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


def _num_context_tokens(group: GroupRecord) -> int:
    """Fewest tokens a generator must hold to add one token to every queued sample."""
    return (
        group.num_prompt_tokens
        + 1
        + max((sample.num_tokens for sample in group.samples if sample.state == _QUEUED), default=0)
    )


def _judge(
    admission: AdmissionRule,
    generator: GeneratorFacts,
    group: GroupRecord,
    oldest: int | None,
    num_context_tokens: int,
) -> Verdict:
    if num_context_tokens > generator.max_context_tokens:
        return Verdict(is_allowed=False, reason=f"the work left needs a context of {num_context_tokens} tokens or more")
    asked = group.prompt_min_version if group.HasField("prompt_min_version") else None
    if group.purpose == types_pb2.PURPOSE_EVALUATE:
        return judge_evaluation(generator_version=generator.policy_version, prompt_min_version=asked)
    return admission.judge(generator_version=generator.policy_version, min_version=oldest, prompt_min_version=asked)


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
    sample.state = _LEASED
    sample.num_leases += 1
    sample.lease_id = f"{group.sequence}.{index}.{sample.attempt}_{sample.num_leases}.{make_suffix()}"
    sample.generator_id = generator.generator_id
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
        predicted_tokens=sample.predicted_tokens if sample.HasField("predicted_tokens") else None,
    )


def may_take(state: RunState, generator: GeneratorFacts, group: GroupRecord, index: int) -> bool:
    """Whether a generator may go on with a sample that another one holds."""
    num_context_tokens = group.num_prompt_tokens + group.samples[index].num_tokens + 1
    oldest = state.index.versions.get(group.group_id)
    return _judge(state.admission(), generator, group, oldest, num_context_tokens).is_allowed


def renew(
    state: RunState,
    generator_id: str,
    lease_ids: Sequence[str],
    now_s: float,
    *,
    tokens_per_second: float | None = None,
    unbroken_since_s: float = 0.0,
) -> list[str]:
    """Extend the leases a generator still works on; a lease with more than half of its life left is not rewritten.

    A lease under which no token came for too long (`Limits.token_silence`) is left to expire: the next generator goes
    on from what is stored. Silence counts from `unbroken_since_s` at the earliest, see `run_clock`. `tokens_per_second`
    is the speed of the generator's samples, where it was measured. Returns the leases that are left to expire.
    """
    held = state.generation_leases.get(generator_id, {})
    life_s = state.limits.generation_lease_s
    max_silence_s = state.limits.token_silence(generator_id, tokens_per_second).value_s
    due: dict[str, list[int]] = {}
    silent: list[str] = []
    for lease_id in lease_ids:
        sample_id = held.get(lease_id)
        if sample_id is None:
            continue
        group_id, index = sample_id
        sample = state.groups[group_id].samples[index]
        if now_s - max(sample.lease_s, sample.last_chunk_s, unbroken_since_s) > max_silence_s:
            silent.append(lease_id)
        elif sample.lease_expire_s - now_s < life_s / 2:
            due.setdefault(group_id, []).append(index)
    for group_id, indices in due.items():
        with state.edit(group_id) as group:
            for index in indices:
                group.samples[index].lease_expire_s = now_s + life_s
    return silent


def expire(state: RunState, now_s: float, *, unbroken_since_s: float = 0.0) -> int:
    """Put the samples of expired generators' leases back at the front of the queue; returns how many.

    After a gap in the run's clock every lease has a full life: until then its holder could not be heard.
    """
    if now_s - unbroken_since_s < state.limits.generation_lease_s:
        return 0
    late: dict[str, list[int]] = {}
    for held in state.generation_leases.values():
        for group_id, index in held.values():
            if state.groups[group_id].samples[index].lease_expire_s <= now_s:
                late.setdefault(group_id, []).append(index)
    for group_id, indices in late.items():
        with state.edit(group_id) as group:
            for index in indices:
                requeue(state, group, index)
            drops.close_group(state, group)
    return sum(len(indices) for indices in late.values())


def requeue(state: RunState, group: GroupRecord, index: int) -> None:
    """Take a sample's lease away, inside an `edit` of its group: another goes on, unless too many have tried."""
    sample = group.samples[index]
    if sample.num_leases - sample.num_moves >= state.limits.max_leases_per_sample:
        drops.lose_sample(state, group, index, drops.TOO_MANY_LEASES)
    else:
        sample.state = _QUEUED
