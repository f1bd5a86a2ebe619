"""Decodes the broker's scored groups into samples for the training step, checking every field."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2
from penstock.wire.codec import decode_versions, float32_array, int32_array
from penstock.wire.routes import RoutingShape, num_route_rows
from penstock.wire.sampling_rules import check_trainable, temperature_of
from penstock.wire.source_tag import read_tag
from services.trainer.batches.training_sample import TrainingSample


def training_samples(group: types_pb2.TrajectoryGroup, *, routing: RoutingShape | None = None) -> list[TrainingSample]:
    """The samples of a group, in order, with routes of this form if they are replayed.

    Raises InvalidFieldError naming the unreadable field.
    """
    prompt = int32_array(group.prompt.token_ids, "prompt.token_ids")
    check_trainable(group.prompt.sampling, field="prompt.sampling")
    temperature = temperature_of(group.prompt.sampling)
    tag = read_tag(group.prompt.metadata_json)
    # Prompts without a tag are put by others, who state limits of their own.
    limit = None if tag is None else group.prompt.sampling.max_new_tokens
    return [
        replace(
            _sample(group.prompt.group_id, prompt, trajectory, temperature=temperature, routing=routing),
            tag=tag,
            max_new_tokens=limit,
        )
        for trajectory in group.trajectories
    ]


def _sample(
    group_id: str,
    prompt: npt.NDArray[np.int32],
    trajectory: types_pb2.Trajectory,
    *,
    temperature: float,
    routing: RoutingShape | None,
) -> TrainingSample:
    tokens = int32_array(trajectory.token_ids, "trajectory.token_ids")
    num_rows = num_route_rows(num_tokens=int(tokens.size), num_prompt_tokens=int(prompt.size))
    score = trajectory.score
    is_scored = score.status == types_pb2.SCORE_STATUS_OK and score.HasField("value")
    return TrainingSample(
        group_id=group_id,
        sample_index=trajectory.key.sample_index,
        prompt_token_ids=prompt,
        completion_token_ids=tokens,
        behavior_logprobs=float32_array(trajectory.behavior_logprobs, "trajectory.behavior_logprobs"),
        policy_versions=decode_versions(
            trajectory.policy_versions, num_tokens=int(tokens.size), field="trajectory.policy_versions"
        ),
        reward=score.value if is_scored else None,
        components=dict(score.components) if is_scored else {},
        loss_mask=_loss_mask(trajectory.loss_mask, num_tokens=int(tokens.size)),
        temperature=temperature,
        advantages=(float32_array(trajectory.advantages, "trajectory.advantages") if trajectory.advantages else None),
        turn_values=float32_array(score.turn_values, "trajectory.score.turn_values") if score.turn_values else None,
        reference_logprobs=(
            float32_array(trajectory.reference_logprobs, "trajectory.reference_logprobs")
            if trajectory.reference_logprobs
            else None
        ),
        routes=(
            None if routing is None else routing.array(trajectory.routes, num_rows=num_rows, field="trajectory.routes")
        ),
    )


def _loss_mask(data: bytes, *, num_tokens: int) -> npt.NDArray[np.bool_] | None:
    if not data:
        return None
    if len(data) != num_tokens:
        raise InvalidFieldError(
            f"trajectory.loss_mask: {len(data)} bytes for {num_tokens} tokens", field="trajectory.loss_mask"
        )
    return np.frombuffer(data, dtype=np.uint8).astype(np.bool_)
