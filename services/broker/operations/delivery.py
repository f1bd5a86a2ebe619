"""Groups to the trainer, and its receipts. Pure operations on a RunState.

Promises: a group is in the hands of one consumer at a time until its step is acknowledged; an acknowledgement marks its
groups trained and advances the policy version in one change; nothing beyond the staleness bound is marked trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from penstock.errors import (
    InvalidFieldError,
    LeaseLostError,
    ServiceUnavailableError,
    StaleError,
    UnknownSampleError,
    VersionConflictError,
)
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import batches, drops
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.rules.batching import ReadyGroup, StepView, choose
from services.broker.rules.staleness import deadline, trained_staleness
from services.broker.state import counters, tallies
from services.broker.state.batch_index import is_parcel
from services.broker.state.run_state import RunState

_SCORED, _DELIVERED = broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DELIVERED
_TRAINED = broker_pb2.SAMPLE_STATE_TRAINED
MAX_CONSUMERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """One microbatch stream of a trainer rank."""

    consumer_id: str
    purpose: types_pb2.Purpose.ValueType
    stream_id: str
    number: int = 0
    """How many streams the consumer had before; given by `attach`."""

    @property
    def key(self) -> str:
        """Which streams replace one another."""
        return f"{self.purpose}:{self.consumer_id}"

    @property
    def mark(self) -> str:
        """What the run remembers of its newest stream."""
        return f"{self.number}.{self.stream_id}"


def attach(state: RunState, consumer: Consumer, *, held: Collection[str]) -> Consumer:
    """A stream begins: it replaces the consumer's older ones; returns the consumer with its number.

    Groups the consumer was handed but does not name are ready again. Groups it names that the broker thinks are ready
    (its store lost the delivery) are marked as handed over, so that they are not handed out twice.
    """
    if consumer.key not in state.run.streams and len(state.run.streams) >= MAX_CONSUMERS:
        raise InvalidFieldError(f"hello.consumer_id: the run has {MAX_CONSUMERS} consumers", field="hello.consumer_id")
    consumer = replace(consumer, number=_number(state, consumer) + 1)
    state.run.streams[consumer.key] = consumer.mark
    lost = [
        group_id
        for group_id in state.delivered[consumer.purpose]
        if state.groups[group_id].consumer_id == consumer.consumer_id and group_id not in held
    ]
    for group_id in lost:
        hand_back(state, group_id)
    for group_id in state.ready[consumer.purpose].intersection(held):
        _hand_over(state, group_id, consumer.consumer_id)
    if consumer.purpose == types_pb2.PURPOSE_TRAIN:
        batches.attach(state, consumer.consumer_id, held)
    return consumer


def check_attached(state: RunState, consumer: Consumer) -> None:
    """Whether a stream is still its consumer's newest one.

    Raises:
        LeaseLostError: a newer stream has taken over: what this one sent would be lost.
        ServiceUnavailableError: the store lost its last commits, the stream's beginning among them. The consumer must
            say hello again, with what it holds; nobody else knows.
    """
    if state.run.streams.get(consumer.key) == consumer.mark:
        return
    if _number(state, consumer) < consumer.number:
        raise ServiceUnavailableError(f"the store lost the beginning of {consumer.consumer_id!r}'s stream: reconnect")
    raise LeaseLostError(f"a newer stream of {consumer.consumer_id!r} has taken over")


def _number(state: RunState, consumer: Consumer) -> int:
    """The number of the consumer's newest stream; 0 when it has none."""
    number = state.run.streams.get(consumer.key, "").partition(".")[0]
    return int(number) if number.isdecimal() else 0


def deliver(state: RunState, consumer: Consumer, *, max_groups: int, target_tokens: int) -> list[str]:
    """Hand ready groups to a consumer; returns what was chosen, in order: ids of groups, and names of parcels.

    Too stale groups are dropped instead. Raises what `check_attached` raises.
    """
    purpose = consumer.purpose
    check_attached(state, consumer)
    if purpose == types_pb2.PURPOSE_TRAIN:
        drops.drop_stale(state)
    ready = [_ready_group(state, state.groups[group_id]) for group_id in state.ready[purpose]]
    if purpose == types_pb2.PURPOSE_EVALUATE:
        ready.sort(key=lambda group: group.sequence)
        chosen = [(group.group_id, 1) for group in ready[:max_groups]]
    else:
        ready += batches.ready_groups(state, max_groups)
        chosen = choose(ready, step_view(state), max_groups=max_groups, target_tokens=target_tokens) if ready else []
    for name, num_groups in chosen:
        if is_parcel(name):
            batches.hand_over(state, name, consumer.consumer_id, num_groups=num_groups)
        else:
            _hand_over(state, name, consumer.consumer_id)
    return [name for name, _num_groups in chosen]


def step_view(state: RunState) -> StepView:
    """The step that the run's trainer is filling."""
    return StepView(
        limits=state.limits,
        policy_version=state.run.policy_version,
        num_delivered=len(state.delivered[types_pb2.PURPOSE_TRAIN]) + state.shelf.num_groups[_DELIVERED],
        num_due=_num_due(state) if state.policy.stale.keeps_places else 0,
    )


def _num_due(state: RunState) -> int:
    """Training groups that are started, not handed out, and must be in the step that is being filled."""
    version, bound = state.run.policy_version, state.limits.max_staleness
    delivered = state.delivered[types_pb2.PURPOSE_TRAIN]
    num_due = sum(
        deadline(version=oldest, max_staleness=bound) <= version
        for group_id, oldest in state.versions.items()
        if group_id not in delivered
    )
    return num_due + batches.num_due(state)


def _ready_group(state: RunState, group: GroupRecord) -> ReadyGroup:
    oldest = state.versions.get(group.group_id, state.run.policy_version)
    kept = [sample.num_tokens for sample in group.samples if sample.state == _SCORED]
    return ReadyGroup(
        group_id=group.group_id,
        deadline=deadline(version=oldest, max_staleness=state.limits.max_staleness),
        sequence=group.sequence,
        num_groups=1,
        num_tokens=sum(kept) + group.num_prompt_tokens * len(kept),
    )


def _hand_over(state: RunState, group_id: str, consumer_id: str) -> None:
    with state.edit(group_id) as group:
        group.consumer_id = consumer_id
        _move_samples(group, _SCORED, _DELIVERED)


def _move_samples(
    group: GroupRecord, before: broker_pb2.SampleState.ValueType, after: broker_pb2.SampleState.ValueType
) -> None:
    for sample in group.samples:
        if sample.state == before:
            sample.state = after


def hand_back(state: RunState, group_id: str) -> None:
    """Make a delivered group ready again."""
    with state.edit(group_id) as group:
        group.consumer_id = ""
        _move_samples(group, _DELIVERED, _SCORED)


def hand_all_back(state: RunState) -> None:
    """Make all delivered groups ready again: whoever held them is not the run's trainer any more."""
    for group_ids in state.delivered.values():
        for group_id in sorted(group_ids):
            hand_back(state, group_id)
    for name in sorted(state.shelf.delivered):
        batches.hand_back(state, name)


def acknowledge(
    state: RunState, consumer_id: str, group_ids: Sequence[str], policy_version: int, now_s: float
) -> broker_pb2.AckStepResponse:
    """Mark a step's groups trained and advance the policy version.

    Raises:
        InvalidFieldError: no groups, or one named twice.
        VersionConflictError: the step does not follow the run's policy version.
        UnknownSampleError: a group is not known.
        LeaseLostError: a group is not in this consumer's hands.
        StaleError: a group is older than the bound allows.
    """
    version = state.run.policy_version
    if not group_ids or len(set(group_ids)) != len(group_ids):
        raise InvalidFieldError("group_ids: at least one, each once", field="group_ids")
    if policy_version <= version and state.trained_ids(policy_version) == set(group_ids):
        return _receipt(state, group_ids, policy_version)
    if policy_version != version + 1:
        raise VersionConflictError(
            f"policy_version: {policy_version} does not follow the run's {version}", policy_version=version
        )
    for group_id in group_ids:
        if group_id not in state.shelf.name_of:
            _check_held(state, group_id, consumer_id)
    batches.check_held(state, group_ids, consumer_id)
    for group_id in group_ids:
        if group_id in state.groups:
            train(state, group_id, policy_version)
    batches.train(state, group_ids, policy_version)
    advance(state, policy_version, now_s)
    return _receipt(state, group_ids, policy_version)


def _check_held(state: RunState, group_id: str, consumer_id: str) -> None:
    group = state.groups.get(group_id)
    if group is None:
        raise UnknownSampleError(f"group {group_id!r} is not known, or was dropped", group_id=group_id)
    if group_id not in state.delivered[types_pb2.PURPOSE_TRAIN] or group.consumer_id != consumer_id:
        raise LeaseLostError(f"group {group_id!r} is not in the hands of {consumer_id!r}", group_id=group_id)
    if drops.is_too_stale(state, group):
        raise StaleError(
            f"group {group_id!r} is more than {state.limits.max_staleness} versions old; drop it",
            group_id=group_id,
        )


def train(state: RunState, group_id: str, policy_version: int) -> None:
    """Mark a group's usable samples trained by the step that made `policy_version`."""
    with state.edit(group_id) as group:
        group.trained_version = policy_version
        group.consumer_id = ""
        for sample in group.samples:
            if sample.state != broker_pb2.SAMPLE_STATE_DROPPED:
                sample.state = _TRAINED
                count_sample_trained(state, group, sample, policy_version)


def count_sample_trained(
    state: RunState, group: GroupRecord, sample: SampleRecord, trained_version: int, *, num_samples: int = 1
) -> None:
    """Put a sample of the step that made `trained_version` into the books, or with -1 take it out."""
    counters.count_trained(
        state,
        version=group.submit_version,
        num_tokens=sample.num_tokens,
        staleness=trained_staleness(sample, trained_version),
        num_samples=num_samples,
    )


def advance(state: RunState, policy_version: int, now_s: float) -> None:
    """Move the run to a later version: forget steps and rows too old to keep, give up what became too stale."""
    state.run.policy_version, state.run.version_s = policy_version, now_s
    oldest_kept = max(policy_version - state.policy.num_retained_steps + 1, batches.oldest_affordable(state))
    for version in sorted(version for version in state.trained_versions if version < oldest_kept):
        tallies.forget_step(state, version)
    counters.fold(state)
    drops.drop_stale(state)


def _receipt(state: RunState, group_ids: Sequence[str], policy_version: int) -> broker_pb2.AckStepResponse:
    counts = Counter(
        trained_staleness(sample, policy_version)
        for group_id in group_ids
        if group_id in state.groups
        for sample in state.groups[group_id].samples
        if sample.state == _TRAINED
    )
    for name in state.shelf.trained.get(policy_version, ()):
        counts += batches.staleness_counts(state.shelf.records[name], policy_version)
    return broker_pb2.AckStepResponse(
        policy_version=state.run.policy_version,
        num_samples=counts.total(),
        max_staleness_seen=max(counts, default=0),
    )
