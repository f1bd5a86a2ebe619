"""Converts stored bytes to the messages that the broker sends. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InternalError
from penstock.v1 import broker_pb2, reward_pb2, types_pb2
from penstock.wire.timestamps import timestamp
from services.broker.records.store import SampleId
from services.broker.records.stored_sample import StoredSample, read_sample
from services.broker.records_pb2 import GroupRecord
from services.broker.rules.staleness import group_version

KEPT_STATES = frozenset(
    (broker_pb2.SAMPLE_STATE_SCORED, broker_pb2.SAMPLE_STATE_DELIVERED, broker_pb2.SAMPLE_STATE_TRAINED)
)
MAX_FRAME_BYTES = 1024 * 1024


def sample_key(sample: SampleId, attempt: int) -> types_pb2.SampleKey:
    """The wire's key of an attempt at a sample."""
    return types_pb2.SampleKey(group_id=sample[0], sample_index=sample[1], attempt=attempt)


def kept_indices(group: GroupRecord) -> list[int]:
    """Indices of a group's usable samples, ascending."""
    return [index for index, sample in enumerate(group.samples) if sample.state in KEPT_STATES]


def trajectory_group(
    group: GroupRecord, prompt: types_pb2.Prompt, stored: Sequence[StoredSample], *, has_text: bool = False
) -> types_pb2.TrajectoryGroup:
    """A group as the broker sends it; `stored` are the tokens of each of `kept_indices(group)`.

    Text is included only with `has_text`: exports need it, trainers do not.
    """
    indices = kept_indices(group)
    return types_pb2.TrajectoryGroup(
        prompt=prompt,
        trajectories=[
            trajectory(group, index, tokens, has_text=has_text) for index, tokens in zip(indices, stored, strict=True)
        ],
        min_policy_version=group_version(group) or 0,
    )


def trajectory(group: GroupRecord, index: int, stored: StoredSample, *, has_text: bool = False) -> types_pb2.Trajectory:
    """One sample with its stored tokens. Raises InternalError if some are missing."""
    sample = group.samples[index]
    if len(stored.token_ids) != 4 * sample.num_tokens:
        raise InternalError(
            f"sample {group.group_id}/{index}: {len(stored.token_ids)} bytes of tokens for {sample.num_tokens} tokens"
        )
    return types_pb2.Trajectory(
        key=sample_key((group.group_id, index), sample.attempt),
        num_leases=sample.num_leases,
        token_ids=stored.token_ids,
        behavior_logprobs=stored.logprobs,
        policy_versions=stored.policy_versions,
        loss_mask=stored.loss_mask,
        finish_reason=sample.finish_reason,
        score=sample.score,
        min_policy_version=sample.min_version if sample.num_tokens else sample.lease_version,
        max_policy_version=sample.max_version if sample.num_tokens else sample.lease_version,
        generator_id=sample.generator_id,
        submit_time=timestamp(group.submit_s),
        lease_time=timestamp(sample.first_lease_s),
        finish_time=timestamp(sample.finish_s),
        score_time=timestamp(sample.score_s),
        text=stored.text if has_text else "",
        routes=stored.routes,
        reference_logprobs=stored.reference_logprobs,
    )


def prefix_of(parts: Sequence[bytes]) -> StoredSample:
    """A sample so far."""
    return read_sample(parts, has_text=False)


def score_item(
    run_id: str,
    prompt: types_pb2.Prompt,
    key: types_pb2.SampleKey,
    finish_reason: types_pb2.FinishReason.ValueType,
    stored: StoredSample,
) -> reward_pb2.ScoreItem:
    """A finished sample, read with its text, for a reward worker."""
    return reward_pb2.ScoreItem(
        key=key,
        prompt_text=prompt.text,
        messages=prompt.messages,
        completion_text=stored.text,
        answer=prompt.answer,
        metadata_json=prompt.metadata_json,
        token_ids=stored.token_ids,
        finish_reason=finish_reason,
        run_id=run_id,
    )
