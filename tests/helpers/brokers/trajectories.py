"""Finished groups as a producer puts them; every number in them follows from the group's name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import numpy as np

from penstock.v1 import types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from tests.helpers.brokers.broker import prompt

STOP = types_pb2.FINISH_REASON_STOP


def trajectory(
    group_id: str, index: int, *, version: int = 0, num_tokens: int = 3, **changes: Any
) -> types_pb2.Trajectory:
    """One scored sample of one version."""
    seed = crc32(f"{group_id}/{index}".encode()) % 1000
    values: dict[str, Any] = {
        "key": types_pb2.SampleKey(group_id=group_id, sample_index=index),
        "num_leases": 1,
        "token_ids": int32_bytes(np.arange(seed, seed + num_tokens)),
        "behavior_logprobs": float32_bytes([-0.5] * num_tokens),
        "policy_versions": encode_versions(np.full(num_tokens, version)),
        "finish_reason": STOP,
        "score": types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=float(index)),
        "min_policy_version": version,
        "max_policy_version": version,
    }
    return types_pb2.Trajectory(**(values | changes))


def group(
    group_id: str, *, num_samples: int = 2, version: int = 0, num_tokens: int = 3, **changes: Any
) -> types_pb2.TrajectoryGroup:
    """A group whose samples are all of one version."""
    values: dict[str, Any] = {
        "prompt": prompt(group_id),
        "trajectories": [
            trajectory(group_id, index, version=version, num_tokens=num_tokens) for index in range(num_samples)
        ],
        "min_policy_version": version,
    }
    return types_pb2.TrajectoryGroup(**(values | changes))


def groups(*names: str, **changes: Any) -> list[types_pb2.TrajectoryGroup]:
    """A group of each name."""
    return [group(name, **changes) for name in names]


def pack_groups(made: Iterable[types_pb2.TrajectoryGroup]) -> bytes:
    """Groups in one piece of bytes, as a put carries them."""
    return types_pb2.TrajectoryGroups(groups=made).SerializeToString()
