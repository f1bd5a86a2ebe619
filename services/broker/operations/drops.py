"""Drops samples and groups, counted by reason, and restarts them. Pure operations on a RunState.

Invariants:
- A training sample is counted as dropped exactly when its state becomes DROPPED, it is restarted, or its group is
  retired with it; evaluation samples are never counted.
- A sample that is restarted counts as submitted once more, as its next attempt. Leases, chunks and scores of
  the previous attempt are recognised by their lease id and refused.
- Whatever the staleness policy, no group that the run's next step may not train on remains: see `drop_stale`.
- Whatever the policy on partial groups, a training group that is ready has at most its prompt's `group_size` scored
  samples, under WAIT and DROP exactly that many, and under SHRINK at least two, or one if its prompt asked for one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from penstock.errors import InvalidFieldError
from penstock.tracing import group_context
from penstock.v1 import broker_pb2, types_pb2
from services.broker.records.ended import Ended
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.state import batches, counters
from services.broker.state.run_state import RunState

STALE = "stale"
TOO_MANY_LEASES = "too_many_leases"
TOO_MANY_ATTEMPTS = "too_many_attempts"
GROUP_TOO_SMALL = "group_too_small"
GROUP_INCOMPLETE = "group_incomplete"
CONTEXT_TOO_LONG = "context_too_long"
ZERO_VARIANCE = "zero_variance"
OVERSAMPLED = "oversampled"
PAYLOAD_LOST = "payload_lost"
NOT_TRAINED = "not_trained"

_FAILURES = frozenset((TOO_MANY_LEASES, TOO_MANY_ATTEMPTS, GROUP_INCOMPLETE, CONTEXT_TOO_LONG, PAYLOAD_LOST))
"""Reasons for which a whole group is dropped because something went wrong."""
_NO_FAILURES = frozenset(("reward_abstained",))
"""Reasons for which a sample gets no score although nothing went wrong."""
MAX_REASONS = 64
"""Reasons in a run's record, which every commit writes, before callers may name no more."""

_SCORED, _DROPPED = broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DROPPED
_USABLE_STATES = frozenset((_SCORED, _DROPPED))


def lose_sample(state: RunState, group: GroupRecord, index: int, reason: str) -> None:
    """Record that a sample got no score, inside an `edit` of its group; call `close_group` before the edit ends.

    It is dropped. If no extra sample takes its place in a training group, PartialGroupPolicy WAIT restarts it,
    up to as many attempts as a sample may have leases.
    """
    if reason not in _NO_FAILURES:
        _note_failure(state, group, index, reason)
    _drop_sample(state, group, index, reason)
    if group.purpose != types_pb2.PURPOSE_TRAIN or num_kept(group) >= _num_wanted(state, group):
        return
    is_waited_for = state.policy.partial_groups == broker_pb2.PARTIAL_GROUP_POLICY_WAIT
    if is_waited_for and group.samples[index].attempt + 1 < state.limits.max_leases_per_sample:
        counters.count_submitted(state, version=group.submit_version, num_samples=1)
        reset_sample(state, group, index)


def close_group(state: RunState, group: GroupRecord) -> None:
    """After samples changed, inside an `edit`: drop those that a training group cannot use."""
    if group.purpose != types_pb2.PURPOSE_TRAIN or group.HasField("put"):
        return
    _abort_extra_samples(state, group)
    reason = _fault(state, group)
    if reason:
        drop(state, group.group_id, reason)


def num_kept(group: GroupRecord) -> int:
    """The samples of a group that are not dropped."""
    return sum(sample.state != _DROPPED for sample in group.samples)


def _num_wanted(state: RunState, group: GroupRecord) -> int:
    """The `group_size` of the prompt of a group that was submitted; the run's policy never changes."""
    return len(group.samples) - state.policy.num_extra_samples


def _abort_extra_samples(state: RunState, group: GroupRecord) -> None:
    """Drop the other samples, in whatever state, once enough are scored to complete the group."""
    if sum(sample.state == _SCORED for sample in group.samples) < _num_wanted(state, group):
        return
    for index, sample in enumerate(group.samples):
        if sample.state not in _USABLE_STATES:
            _drop_sample(state, group, index, OVERSAMPLED)


def _fault(state: RunState, group: GroupRecord) -> str:
    """Why a training group can never satisfy the run's policy; empty if it can."""
    count, policy = num_kept(group), state.policy
    if policy.partial_groups == broker_pb2.PARTIAL_GROUP_POLICY_SHRINK:
        # An advantage in a group needs two, unless the prompt asked for one.
        if count < min(2, _num_wanted(state, group)):
            return GROUP_TOO_SMALL
    elif count < _num_wanted(state, group):
        is_drop = policy.partial_groups == broker_pb2.PARTIAL_GROUP_POLICY_DROP
        return GROUP_INCOMPLETE if is_drop else TOO_MANY_ATTEMPTS
    kept = [sample for sample in group.samples if sample.state != _DROPPED]
    # Known before the reference's log-probs, which are then not computed.
    # The reward of a group of one always equals itself.
    if policy.drops_zero_variance and len(kept) > 1 and all(sample.HasField("score") for sample in kept):
        return ZERO_VARIANCE if len({sample.score.value for sample in kept}) == 1 else ""
    return ""


def drop(state: RunState, name: str, reason: str) -> int:
    """Drop a whole live record; returns the number of its samples that were not dropped before."""
    record = state.groups[name]
    num_samples = counters.count_record_dropped(state, record, reason)
    state.retire(name)
    state.pending.ended.append(Ended(group=record, reason=reason, is_failure=reason in _FAILURES))
    return num_samples


def _note_failure(state: RunState, group: GroupRecord, index: int, reason: str) -> None:
    """Keep a sample that failed for its trace, inside an `edit`; its group will be traced with it."""
    if not group.traceparent:
        context = group_context(state.run.run_id, group.group_id)
        group.traceparent = replace(context, is_sampled=False).traceparent
    sample = SampleRecord()
    sample.CopyFrom(group.samples[index])
    state.pending.ended.append(Ended(group=group, reason=reason, is_failure=True, index=index, sample=sample))


def check_countable(dropped: Mapping[str, int], reason: str) -> None:
    """Raise InvalidFieldError if a caller's reason is one too many for these counts."""
    if reason not in dropped and len(dropped) >= MAX_REASONS:
        raise InvalidFieldError(
            f"reason: {reason!r} would be one more than the {MAX_REASONS} reasons the run counts; use one of those",
            field="reason",
        )


def drop_groups(state: RunState, group_ids: Iterable[str], reason: str) -> int:
    """Drop the live ones of these groups; returns the number of samples."""
    return sum(
        drop(state, piece, reason)
        for name, members in state.records_of(group_ids).items()
        if name in state.index.live
        for piece in state.carve(name, members)
    )


def drop_all(state: RunState, reason: str) -> int:
    """Drop everything in flight; returns the number of samples."""
    return sum(drop(state, name, reason) for name in list(state.index.live))


def drop_stale(state: RunState) -> None:
    """Drop every training group that became too stale; the run's StalenessPolicy decides what follows.

    Under WAIT admission and delivery keep this from happening while generators report their versions truthfully and
    steps are whole. A delivered group is dropped for good: acknowledgements name groups, and a late one for the old
    samples must not count for new ones. So is one that was put: the broker has no prompt to restart it from.
    """
    oldest_allowed = state.run.policy_version - state.limits.max_staleness
    for name in state.index.older_than(oldest_allowed):
        record = state.groups[name]
        if record.HasField("put") or record.consumer_id or not state.policy.stale.restarts_stale:
            drop_groups(state, batches.older_than(record, oldest_allowed), STALE)
        else:
            _restart(state, name, STALE)


def _restart(state: RunState, group_id: str, reason: str) -> None:
    """Drop a training group's samples and queue its prompt as another attempt."""
    with state.edit(group_id) as group:
        counters.count_record_dropped(state, group, reason)
        group.submit_version = state.run.policy_version
        counters.count_submitted(state, version=group.submit_version, num_samples=len(group.samples))
        for index in range(len(group.samples)):
            reset_sample(state, group, index)


def reset_sample(state: RunState, group: GroupRecord, index: int) -> None:
    """Queue a sample as its next attempt, inside an `edit`: its tokens, score and leases are discarded."""
    old = group.samples[index]
    state.index.grow(group.group_id, -batches.sample_bytes(old))
    fresh = SampleRecord(state=broker_pb2.SAMPLE_STATE_QUEUED, attempt=old.attempt + 1)
    if old.HasField("predicted_tokens"):
        fresh.predicted_tokens = old.predicted_tokens
    old.CopyFrom(fresh)
    group.is_compact = False
    state.clear((group.group_id, index))


def keep_trained(state: RunState, group: GroupRecord, indices: Collection[int]) -> None:
    """Leave exactly the samples at `indices` undropped, inside an `edit` of a group that a step trained."""
    for index, sample in enumerate(group.samples):
        if sample.state != _DROPPED and index not in indices:
            _drop_sample(state, group, index, NOT_TRAINED)
        elif sample.state == _DROPPED and index in indices:
            counters.count_submitted(state, version=group.submit_version, num_samples=1)
            reset_sample(state, group, index)


def _drop_sample(state: RunState, group: GroupRecord, index: int, reason: str) -> None:
    sample = group.samples[index]
    state.index.grow(group.group_id, -batches.sample_bytes(sample))
    sample.state = _DROPPED
    state.clear((group.group_id, index))
    if group.purpose == types_pb2.PURPOSE_TRAIN:
        counters.count_dropped(state, version=group.submit_version, num_tokens=sample.num_tokens, reason=reason)
