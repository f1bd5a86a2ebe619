"""Converts recorded groups to groups of another run. Pure.

Rule: a group keeps its staleness, not its version numbers. It was trained by the step that made version P, so from
version P - 1; if the other run is at version V, every policy version of the group is shifted by V - (P - 1). Token ids,
log-probs, masks, advantages and scores stay as recorded: the log-probs are those of the policy that sampled, whatever
its number is now. Versions that would fall below 0 become 0 (at the start of a run there is nothing older), and are
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from console.recording.reader import RecordedGroup
from penstock.v1 import types_pb2
from penstock.wire.codec import int64_array


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebased:
    """A recorded group, ready to be put into another run."""

    group: types_pb2.TrajectoryGroup
    """Its samples with a score, possibly none."""
    staleness: int
    """Versions between the trainer and the group's oldest token, as recorded."""
    num_unscored: int
    """Samples left out because their score has no value."""
    num_clipped: int
    """Samples with a version that would have fallen below 0."""


def rebase(recorded: RecordedGroup, *, policy_version: int, prefix: str) -> Rebased:
    """Convert the group for a run at `policy_version`, its name prefixed with `prefix`."""
    shift = policy_version - (recorded.policy_version - 1)
    prompt = types_pb2.Prompt()
    prompt.CopyFrom(recorded.group.prompt)
    prompt.group_id = prefix + prompt.group_id
    # This asked a generator for a version of the recorded run; no generator will see it here.
    prompt.ClearField("min_policy_version")
    scored = [one for one in recorded.group.trajectories if one.score.status == types_pb2.SCORE_STATUS_OK]
    moved = [_moved(trajectory, prompt.group_id, shift) for trajectory in scored]
    oldest = min((trajectory.min_policy_version for trajectory in scored), default=recorded.policy_version - 1)
    return Rebased(
        group=types_pb2.TrajectoryGroup(
            prompt=prompt,
            trajectories=moved,
            min_policy_version=min((trajectory.min_policy_version for trajectory in moved), default=0),
        ),
        staleness=max(0, recorded.policy_version - 1 - oldest),
        num_unscored=len(recorded.group.trajectories) - len(scored),
        num_clipped=sum(trajectory.min_policy_version + shift < 0 for trajectory in scored),
    )


def _moved(trajectory: types_pb2.Trajectory, group_id: str, shift: int) -> types_pb2.Trajectory:
    moved = types_pb2.Trajectory()
    moved.CopyFrom(trajectory)
    moved.key.group_id = group_id
    versions = int64_array(trajectory.policy_versions.versions, "policy_versions.versions")
    moved.policy_versions.versions = np.maximum(versions + shift, 0).astype("<i8").tobytes()
    moved.min_policy_version = max(0, trajectory.min_policy_version + shift)
    moved.max_policy_version = max(0, trajectory.max_policy_version + shift)
    return moved
