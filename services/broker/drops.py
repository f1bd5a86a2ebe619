"""Giving samples and groups up, counted by reason, and beginning them anew. Pure operations on a RunState.

Invariants:
- A training sample is counted as dropped exactly when its state becomes DROPPED, it is begun anew, or its group is
  retired from under it; evaluation samples are never counted.
- A sample that is begun anew counts as submitted once more, as its next attempt. What still belongs to the attempt
  before (leases, chunks, scores) is recognised by its lease id and refused.
- Whatever the stale policy, no group stays that the run's next step may not train on: see `drop_stale`.
"""

from __future__ import annotations

from penstock.v1 import broker_pb2, types_pb2
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.run_state import RunState
from services.broker.staleness import deadline, group_version

STALE = "stale"
TOO_MANY_LEASES = "too_many_leases"
GROUP_TOO_SMALL = "group_too_small"
CONTEXT_TOO_LONG = "context_too_long"

_DROPPED = broker_pb2.SAMPLE_STATE_DROPPED
_USABLE_STATES = frozenset((broker_pb2.SAMPLE_STATE_SCORED, _DROPPED))


def drop_sample(state: RunState, group: GroupRecord, index: int, reason: str) -> None:
    """Give one sample up, inside an `edit` of its group; `close_group` must follow before the edit ends."""
    sample = group.samples[index]
    sample.state = _DROPPED
    state.clear((group.group_id, index))
    _count(state, group, 1, reason)


def close_group(state: RunState, group: GroupRecord, now_s: float) -> None:
    """After samples changed, inside an `edit`: note readiness, and give a training group up that became too small."""
    num_usable = sum(sample.state != _DROPPED for sample in group.samples)
    if group.purpose == types_pb2.PURPOSE_TRAIN and num_usable < state.limits.min_usable_samples:
        _count(state, group, num_usable, GROUP_TOO_SMALL)
        state.retire(group.group_id)
    elif all(sample.state in _USABLE_STATES for sample in group.samples):
        group.ready_s = now_s


def drop_group(state: RunState, group_id: str, reason: str) -> int:
    """Give a live group up; returns its number of samples that were not dropped before. Trained groups stay: 0."""
    if group_id not in state.live:
        return 0
    group = state.groups[group_id]
    num_samples = sum(sample.state != _DROPPED for sample in group.samples)
    _count(state, group, num_samples, reason)
    state.retire(group_id)
    return num_samples


def drop_stale(state: RunState) -> int:
    """Give up every training group that the run's version left behind, and queue its prompt anew.

    Under StalePolicy WAIT admission and delivery keep this from happening while generators report their versions
    truthfully and steps are whole. A group in a consumer's hands is given up for good: acknowledgements name groups,
    and a late one of the old samples must not count for new ones.

    Returns:
        The number of samples dropped.
    """
    version, bound = state.run.policy_version, state.limits.max_staleness
    late = [
        group_id
        for group_id, oldest in state.versions.items()
        if deadline(version=oldest, max_staleness=bound) < version
    ]
    num_samples = 0
    for group_id in late:
        is_delivered = bool(state.groups[group_id].consumer_id)
        num_samples += drop_group(state, group_id, STALE) if is_delivered else _begin_anew(state, group_id, STALE)
    return num_samples


def _begin_anew(state: RunState, group_id: str, reason: str) -> int:
    """Drop a training group's samples and queue its prompt as another attempt; returns the number dropped."""
    with state.edit(group_id) as group:
        num_samples = sum(sample.state != _DROPPED for sample in group.samples)
        _count(state, group, num_samples, reason)
        state.run.submitted += len(group.samples)
        group.submit_version = state.run.policy_version
        group.ready_s = 0.0
        for index in range(len(group.samples)):
            reset_sample(state, group, index)
    return num_samples


def reset_sample(state: RunState, group: GroupRecord, index: int) -> None:
    """Queue a sample as its next attempt, inside an `edit`: its tokens, score and leases are gone."""
    old = group.samples[index]
    fresh = SampleRecord(state=broker_pb2.SAMPLE_STATE_QUEUED, attempt=old.attempt + 1)
    if old.HasField("predicted_tokens"):
        fresh.predicted_tokens = old.predicted_tokens
    old.CopyFrom(fresh)
    state.clear((group.group_id, index))


def _count(state: RunState, group: GroupRecord, num_samples: int, reason: str) -> None:
    if group.purpose == types_pb2.PURPOSE_TRAIN and num_samples:
        state.run.dropped[reason] += num_samples


def is_too_stale(state: RunState, group: GroupRecord) -> bool:
    """Whether the run's next step may no longer train on the group."""
    oldest = group_version(group)
    return (
        oldest is not None
        and deadline(version=oldest, max_staleness=state.limits.max_staleness) < state.run.policy_version
    )
