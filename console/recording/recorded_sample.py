"""Represents a recorded sample: the broker's own messages, and the step that trained it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.config import ConfigError
from penstock.v1 import broker_pb2, types_pb2

Step = tuple[str, int, int]
"""Run id, policy version, history."""


class RecordingError(ConfigError):
    """A recording cannot be read or written; the message names the file, the row and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One trained sample.

    Example: Recorded(run_id="math-7b", policy_version=12, history=0, prompt=..., trajectory=...)
    """

    run_id: str
    """The run it was trained in."""
    policy_version: int
    """The version its step produced, >= 1."""
    history: int
    """The run's history counter at recording: steps of the same version with a higher one replace it."""
    prompt: types_pb2.Prompt
    """Its prompt."""
    trajectory: types_pb2.Trajectory
    """Its tokens, log-probs, versions and score, and the completion as text."""
    previous_score: types_pb2.Score | None = None
    """Its score before it was scored again."""

    @property
    def step(self) -> Step:
        """The step that trained it."""
        return self.run_id, self.policy_version, self.history

    @property
    def position(self) -> tuple[str, int]:
        """Identifies the sample within its step."""
        return self.prompt.group_id, self.trajectory.key.sample_index

    def rescored(self, score: types_pb2.Score) -> Recorded:
        """The same sample with another score; the current one is kept beside it."""
        trajectory = types_pb2.Trajectory()
        trajectory.CopyFrom(self.trajectory)
        trajectory.score.CopyFrom(score)
        return replace(self, trajectory=trajectory, previous_score=self.trajectory.score)


def samples_of(run_id: str, response: broker_pb2.ExportTrajectoriesResponse) -> list[Recorded]:
    """The samples of an exported group, by index."""
    return [
        Recorded(
            run_id=run_id,
            policy_version=response.policy_version,
            history=response.history,
            prompt=response.group.prompt,
            trajectory=trajectory,
        )
        for trajectory in response.group.trajectories
    ]


def group_of(samples: Sequence[Recorded]) -> types_pb2.TrajectoryGroup:
    """Join the samples of one group."""
    return types_pb2.TrajectoryGroup(
        prompt=samples[0].prompt,
        trajectories=[sample.trajectory for sample in samples],
        min_policy_version=min(sample.trajectory.min_policy_version for sample in samples),
    )
