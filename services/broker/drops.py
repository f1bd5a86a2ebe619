"""Giving samples and groups up, counted by reason. Pure operations on a RunState.

Invariant: a training sample is counted as dropped exactly when its state becomes DROPPED or its group is retired from
under it; evaluation samples are never counted.
"""

from __future__ import annotations

from penstock.v1 import broker_pb2, types_pb2
from services.broker.records_pb2 import GroupRecord
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
    """Give up every training group that the run's version left behind; returns the number of samples.

    Admission and delivery keep this from happening while generators report their versions truthfully.
    """
    version, bound = state.run.policy_version, state.limits.max_staleness
    late = [
        group_id
        for group_id, oldest in state.versions.items()
        if deadline(version=oldest, max_staleness=bound) < version
    ]
    return sum(drop_group(state, group_id, STALE) for group_id in late)


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
