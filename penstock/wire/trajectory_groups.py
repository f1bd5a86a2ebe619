"""Prompts and finished groups from plain values, and samples back from them.

A message has fields that follow from others (a sample's group, its versions' bounds); `complete_group` fills in those
that are not set, so a group that is made by hand needs to state nothing twice.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.v1 import types_pb2
from penstock.wire.codec import (
    Float32,
    Int32,
    Int64,
    UInt8,
    decode_versions,
    encode_versions,
    float32_array,
    float32_bytes,
    int32_array,
    int32_bytes,
    int64_array,
)

Ints = Sequence[int] | Int32
Floats = Sequence[float] | Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A finished completion and its reward. Lists have one entry a token."""

    token_ids: Ints
    logprobs: Floats
    """Natural logarithms, of the sampled tokens under the distribution that they were drawn from."""
    policy_version: int | Sequence[int] | Int64
    """The version that sampled the tokens, or that of each token."""
    reward: float
    loss_mask: Sequence[int] | UInt8 | None = None
    """1 where a token is trained on, 0 where it was given, as a tool's output is; None means 1 everywhere."""
    advantages: Floats | None = None
    """None lets the trainer compute them from the rewards of the group."""
    is_truncated: bool = False
    """Whether it was cut at its maximal length."""
    text: str = ""
    routes: bytes = b""
    """For a run that replays them, rows of the prompt's and the completion's positions but the last: see `routes`."""


def make_prompt(
    token_ids: Ints,
    *,
    group_id: str = "",
    text: str = "",
    answer: str = "",
    metadata: Mapping[str, object] | None = None,
    max_new_tokens: int = 0,
    temperature: float = 1.0,
) -> types_pb2.Prompt:
    """A training prompt.

    Args:
        token_ids: At least one.
        group_id: Names the group that it makes, in its run: submitting or putting it again has no effect. Random if
            empty.
        text: The prompt as text, for reward models.
        answer: Reference answer, for reward models.
        metadata: Further columns of the data, for reward models.
        max_new_tokens: Most completion tokens; 0 means as many as the run allows.
        temperature: To sample with.
    """
    return types_pb2.Prompt(
        group_id=group_id or secrets.token_hex(12),
        token_ids=int32_bytes(token_ids),
        sampling=types_pb2.SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens),
        text=text,
        answer=answer,
        metadata_json="" if metadata is None else json.dumps(metadata),
        purpose=types_pb2.PURPOSE_TRAIN,
    )


def make_group(prompt: types_pb2.Prompt, samples: Sequence[Sample]) -> types_pb2.TrajectoryGroup:
    """A finished group: the samples of one prompt."""
    return complete_group(types_pb2.TrajectoryGroup(prompt=prompt, trajectories=map(_trajectory, samples)))


def _trajectory(sample: Sample) -> types_pb2.Trajectory:
    truncated, stopped = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP
    versions = np.broadcast_to(np.asarray(sample.policy_version, np.int64), len(sample.token_ids))
    return types_pb2.Trajectory(
        num_leases=1,
        token_ids=int32_bytes(sample.token_ids),
        behavior_logprobs=float32_bytes(sample.logprobs),
        policy_versions=encode_versions(versions),
        loss_mask=b"" if sample.loss_mask is None else np.asarray(sample.loss_mask, np.uint8).tobytes(),
        advantages=b"" if sample.advantages is None else float32_bytes(sample.advantages),
        finish_reason=truncated if sample.is_truncated else stopped,
        score=types_pb2.Score(value=sample.reward),
        text=sample.text,
        routes=sample.routes,
    )


def complete_group(group: types_pb2.TrajectoryGroup) -> types_pb2.TrajectoryGroup:
    """The same message, with unset fields that follow from others filled in. Raises InvalidFieldError."""
    prompt, trajectories = group.prompt, group.trajectories
    prompt.purpose = prompt.purpose or types_pb2.PURPOSE_TRAIN
    prompt.group_size = prompt.group_size or len(trajectories)
    for index, trajectory in enumerate(trajectories):
        if not trajectory.key.group_id:
            trajectory.key.group_id, trajectory.key.sample_index = prompt.group_id, index
        if trajectory.score.HasField("value"):
            trajectory.score.status = trajectory.score.status or types_pb2.SCORE_STATUS_OK
        versions = int64_array(trajectory.policy_versions.versions, "policy_versions.versions")
        if versions.size and not trajectory.max_policy_version:
            trajectory.min_policy_version, trajectory.max_policy_version = int(versions.min()), int(versions.max())
    oldest = min((each.min_policy_version for each in trajectories), default=0)
    group.min_policy_version = group.min_policy_version or oldest
    return group


def samples_of(group: types_pb2.TrajectoryGroup) -> list[Sample]:
    """The samples of a group, as numpy arrays of int32, float32, int64 and uint8. Raises InvalidFieldError."""
    return [_sample(trajectory) for trajectory in group.trajectories]


def _sample(trajectory: types_pb2.Trajectory) -> Sample:
    token_ids = int32_array(trajectory.token_ids, "token_ids")
    runs, advantages = trajectory.policy_versions, trajectory.advantages
    return Sample(
        token_ids=token_ids,
        logprobs=float32_array(trajectory.behavior_logprobs, "behavior_logprobs"),
        policy_version=decode_versions(runs, num_tokens=token_ids.size, field="policy_versions"),
        reward=trajectory.score.value,
        loss_mask=np.frombuffer(trajectory.loss_mask, np.uint8) if trajectory.loss_mask else None,
        advantages=float32_array(advantages, "advantages") if advantages else None,
        is_truncated=trajectory.finish_reason == types_pb2.FINISH_REASON_LENGTH,
        text=trajectory.text,
        routes=trajectory.routes,
    )
