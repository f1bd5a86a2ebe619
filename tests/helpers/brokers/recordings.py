"""Recorded samples to write, read, replay and score again."""

from __future__ import annotations

from typing import Any

from console.recording.recorded_sample import Recorded
from penstock.v1 import types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes


def recorded(
    group_id: str = "g1", index: int = 0, *, version: int = 1, history: int = 0, value: float = 0.5, **changes: Any
) -> Recorded:
    """A sample of three tokens with every field set."""
    trajectory = types_pb2.Trajectory(
        key=types_pb2.SampleKey(group_id=group_id, sample_index=index, attempt=2),
        num_leases=1,
        token_ids=int32_bytes([5, 6, 7]),
        behavior_logprobs=float32_bytes([-0.1, -1e-30, -12.345678]),
        policy_versions=encode_versions([0, 0, 1]),
        loss_mask=b"\1\0\1",
        finish_reason=types_pb2.FINISH_REASON_STOP,
        score=types_pb2.Score(
            status=types_pb2.SCORE_STATUS_OK, value=value, model="m", components={"b": 1.0, "a": 0.1}
        ),
        min_policy_version=0,
        max_policy_version=1,
        generator_id="gen-1",
        text="zwei \u4e8c",
        routes=bytes([0, 255, 1, 128]),
    )
    trajectory.score.components.update({"b": 1.0, "a": 0.1})
    trajectory.score.details.update({"votes": "[1, null]", "answered": "j"})
    trajectory.score.latency.FromNanoseconds(12_345_678)
    for name, microseconds in (("submit_time", 1), ("lease_time", 2), ("finish_time", 1_700_000_000_123_457)):
        getattr(trajectory, name).FromMicroseconds(microseconds)
    prompt = types_pb2.Prompt(
        group_id=group_id,
        token_ids=int32_bytes([1, 2]),
        group_size=2,
        sampling=types_pb2.SamplingParams(temperature=0.7, max_new_tokens=9, seed=2**63, stop_token_ids=[3]),
        messages=[types_pb2.ChatMessage(role="user", content='say "2"')],
        answer="2",
        metadata_json='{"a": [1, 2.50]}',
        purpose=types_pb2.PURPOSE_TRAIN,
        min_policy_version=0,
    )
    values: dict[str, Any] = {"run_id": "run-1", "policy_version": version, "history": history}
    return Recorded(prompt=prompt, trajectory=trajectory, **(values | changes))
