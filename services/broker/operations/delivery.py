"""Delivers groups to the trainer and processes its acknowledgements. Pure operations on a RunState.

Promises: a group is delivered to one consumer at a time until its step is acknowledged; an acknowledgement marks its
groups trained and advances the policy version in one change; nothing beyond the staleness bound is marked trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
from services.broker.operations import drops
from services.broker.records.ended import Ended
from services.broker.records_pb2 import GroupRecord
from services.broker.rules.batching import ReadyGroup, StepView, choose
from services.broker.rules.sample_policy import MAX_RETAINED_GROUPS
from services.broker.rules.staleness import deadline, staleness
from services.broker.state import batches, counters, tallies
from services.broker.state.run_state import RunState

_SCORED, _DELIVERED = broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DELIVERED
_TRAINED = broker_pb2.SAMPLE_STATE_TRAINED
MAX_CONSUMERS = 256
MAX_TRAINED_BYTES = 256 * 1024 * 1024
"""Bound on a run's put payload retained after training; beyond it older steps lose even their records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """One microbatch stream of a trainer rank."""

    consumer_id: str
    purpose: types_pb2.Purpose.ValueType
    stream_id: str
    number: int = 0
    """Number of streams that the consumer had before; set by `attach`."""

    @property
    def key(self) -> str:
        """Identifies streams that replace one another."""
        return f"{self.purpose}:{self.consumer_id}"

    @property
    def mark(self) -> str:
        """What the run stores about its newest stream."""
        return f"{self.number}.{self.stream_id}"


def attach(state: RunState, consumer: Consumer, *, held: Collection[str]) -> Consumer:
    """Attach a stream, which replaces the consumer's older ones; returns the consumer with its number.

    Groups delivered to the consumer that it does not name become ready again. Groups it names that are ready in the
    broker (its store lost the delivery) are marked as delivered, so that they are not delivered twice.
    """
    if consumer.key not in state.run.streams and len(state.run.streams) >= MAX_CONSUMERS:
        raise InvalidFieldError(f"hello.consumer_id: the run has {MAX_CONSUMERS} consumers", field="hello.consumer_id")
    consumer = replace(consumer, number=_number(state, consumer) + 1)
    state.run.streams[consumer.key] = consumer.mark
    for name in list(state.index.delivered[consumer.purpose]):
        record = state.groups[name]
        if record.consumer_id == consumer.consumer_id:
            for lost in state.carve(name, [group_id for group_id in batches.ids(record) if group_id not in held]):
                hand_back(state, lost)
    for name, group_ids in state.records_of(held).items():
        if state.index.is_ready(name, consumer.purpose):
            for piece in state.carve(name, group_ids):
                _hand_over(state, piece, consumer.consumer_id)
    return consumer


def check_attached(state: RunState, consumer: Consumer) -> None:
    """Check that a stream is still its consumer's newest one.

    Raises:
        LeaseLostError: a newer stream has replaced it: anything sent on this one would be lost.
        ServiceUnavailableError: the store lost its last commits, including the stream's attachment. The consumer must
            send its hello again, with the groups it holds, which only it knows.
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
    """Deliver ready groups to a consumer; returns the names of their records, in order.

    Groups that are too stale are dropped instead. Raises the errors of `check_attached`.
    """
    purpose = consumer.purpose
    check_attached(state, consumer)
    if purpose == types_pb2.PURPOSE_TRAIN:
        drops.drop_stale(state)
    names = state.index.first_ready(purpose, max_groups)
    chosen = [(name, 1) for name in names]
    if purpose == types_pb2.PURPOSE_TRAIN and names:
        ready = [_ready_group(state, name) for name in names]
        chosen = choose(ready, step_view(state), max_groups=max_groups, target_tokens=target_tokens)
    for name, num_groups in chosen:
        record = state.groups[name]
        if num_groups < batches.num_groups(record):
            state.carve(name, batches.ids(record)[:num_groups])
        _hand_over(state, name, consumer.consumer_id)
    return [name for name, _num_groups in chosen]


def step_view(state: RunState) -> StepView:
    """The step that the run's trainer is filling."""
    return StepView(
        limits=state.limits,
        policy_version=state.run.policy_version,
        num_delivered=state.index.num_delivered,
        num_due=state.index.num_due(oldest_due(state)) if state.policy.stale.keeps_places else 0,
    )


def oldest_due(state: RunState) -> int:
    """The newest version whose groups must be in the step being filled."""
    return state.run.policy_version - state.limits.max_staleness


def _ready_group(state: RunState, name: str) -> ReadyGroup:
    record = state.groups[name]
    oldest = state.index.versions.get(name, state.run.policy_version)
    return ReadyGroup(
        group_id=name,
        deadline=deadline(version=oldest, max_staleness=state.limits.max_staleness),
        sequence=record.sequence,
        num_groups=batches.num_groups(record),
        num_tokens=batches.num_tokens(record),
    )


def _hand_over(state: RunState, name: str, consumer_id: str) -> None:
    with state.edit(name) as record:
        record.consumer_id = consumer_id
        _move_samples(record, _SCORED, _DELIVERED)


def _move_samples(
    group: GroupRecord, before: broker_pb2.SampleState.ValueType, after: broker_pb2.SampleState.ValueType
) -> None:
    for sample in group.samples:
        if sample.state == before:
            sample.state = after


def hand_back(state: RunState, name: str) -> None:
    """Make a delivered record ready again."""
    with state.edit(name) as record:
        record.consumer_id = ""
        _move_samples(record, _DELIVERED, _SCORED)


def hand_all_back(state: RunState) -> None:
    """Make all delivered groups ready again: their consumer is no longer the run's trainer."""
    for names in state.index.delivered.values():
        for name in sorted(names):
            hand_back(state, name)


def acknowledge(
    state: RunState, consumer_id: str, group_ids: Sequence[str], policy_version: int, now_s: float
) -> broker_pb2.AckStepResponse:
    """Mark a step's groups trained and advance the policy version.

    Raises:
        InvalidFieldError: no groups, or one named twice.
        VersionConflictError: the step does not follow the run's policy version.
        UnknownSampleError: a group is not known.
        LeaseLostError: a group is not delivered to this consumer.
        StaleError: a group is older than the bound allows.
    """
    version = state.run.policy_version
    if not group_ids or len(set(group_ids)) != len(group_ids):
        raise InvalidFieldError("group_ids: at least one, each once", field="group_ids")
    if policy_version <= version and state.trained_ids(policy_version) == set(group_ids):
        return _receipt(state, policy_version)
    if policy_version != version + 1:
        raise VersionConflictError(
            f"policy_version: {policy_version} does not follow the run's {version}", policy_version=version
        )
    records = state.records_of(group_ids)
    known = {group_id for members in records.values() for group_id in members}
    for group_id in group_ids:
        if group_id not in known:
            raise UnknownSampleError(f"group {group_id!r} is not known, or was dropped", group_id=group_id)
    for name, members in records.items():
        _check_held(state, name, members, consumer_id)
    for name, members in records.items():
        train(state, name, members, policy_version)
    advance(state, policy_version, now_s)
    return _receipt(state, policy_version)


def _check_held(state: RunState, name: str, members: Sequence[str], consumer_id: str) -> None:
    record = state.groups[name]
    if name not in state.index.delivered[types_pb2.PURPOSE_TRAIN] or record.consumer_id != consumer_id:
        raise LeaseLostError(f"group {members[0]!r} is not delivered to {consumer_id!r}", group_id=members[0])
    if state.index.versions.get(name, state.run.policy_version) >= oldest_due(state):
        return
    for group_id in batches.older_than(record, oldest_due(state)):
        if group_id in members:
            raise StaleError(
                f"group {group_id!r} is more than {state.limits.max_staleness} versions old; drop it",
                group_id=group_id,
            )


def train(state: RunState, name: str, group_ids: Collection[str], policy_version: int) -> None:
    """Mark a live record's groups, without dropped samples, trained by the step that made `policy_version`."""
    for piece in state.carve(name, group_ids):
        with state.edit(piece) as record:
            record.trained_version, record.consumer_id = policy_version, ""
            if not record.HasField("put"):
                record.stored_bytes = state.index.stored_bytes(piece)
            for sample in record.samples:
                if sample.state != broker_pb2.SAMPLE_STATE_DROPPED:
                    sample.state = _TRAINED
        counters.count_record_trained(state, record)
        state.pending.ended.append(Ended(group=record))


def advance(state: RunState, policy_version: int, now_s: float) -> None:
    """Advance the run to a later version: forget steps and rows too old to keep, drop groups that became too stale."""
    state.run.policy_version, state.run.version_s = policy_version, now_s
    index = state.index
    oldest_kept = max(
        policy_version - state.policy.num_retained_steps + 1,
        _oldest_affordable(index.trained_bytes, MAX_TRAINED_BYTES),
        _oldest_affordable(index.retained_bytes, state.policy.max_trained_bytes),
        _oldest_affordable({step: len(names) for step, names in index.trained.items()}, MAX_RETAINED_GROUPS),
    )
    for version in sorted(version for version in state.index.trained if version < oldest_kept):
        tallies.forget_step(state, version)
    counters.fold(state)
    drops.drop_stale(state)


def _oldest_affordable(size_of_steps: Mapping[int, int], most: int) -> int:
    """The oldest step that may be retained: together they are at most this large, or only the newest step is."""
    size, oldest = 0, 0
    for version in sorted(size_of_steps, reverse=True):
        size += size_of_steps[version]
        if oldest and size > most:
            return oldest
        oldest = version
    return 0


def _receipt(state: RunState, policy_version: int) -> broker_pb2.AckStepResponse:
    counts: Counter[int] = Counter()
    for name in state.index.trained.get(policy_version, ()):
        _num_tokens, versions = batches.kept_samples(state.groups[name])
        for oldest, count in Counter(versions).items():
            counts[staleness(policy_version=policy_version - 1, version=oldest)] += count
    return broker_pb2.AckStepResponse(
        policy_version=state.run.policy_version,
        num_samples=counts.total(),
        max_staleness_seen=max(counts, default=0),
    )
