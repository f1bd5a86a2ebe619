"""Checks and decodes put requests once on arrival. Pure.

All checks that need no run state are here, over all samples of the request at once; `append_trajectories` does the
rest. The trajectories are not parsed again: only their bytes are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise, repeat
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2
from penstock.wire.codec import Packed, group_slices
from penstock.wire.sampling_rules import check_trainable
from services.broker.ingest.token_chunk import MAX_LOGPROB
from services.broker.ingest.trajectory_columns import PutGroups
from services.broker.ingest.validation import MAX_METADATA_BYTES, check_id
from services.broker.rules.limits import require

MAX_GROUPS = 1_024
MAX_BYTES = 4 * 1024 * 1024
CHECKED_BYTES = 8 * 1024 * 1024
_OK = types_pb2.SCORE_STATUS_OK
_FINISHED = frozenset((types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH))
_LARGE_BYTES = 16 * 1024
"""From this size on, checking an array by itself costs less than copying it together with others."""
_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")


def read_put(
    packed: Packed, messages: Sequence[types_pb2.TrajectoryGroup] | None = None, *, max_bytes: int = MAX_BYTES
) -> PutGroups:
    """The groups of a request, each with its fault if malformed; `messages` if they are parsed already.

    Raises InvalidFieldError if the request as a whole cannot be read.
    """
    if len(packed) > max_bytes:
        raise InvalidFieldError(
            f"groups: {len(packed)} bytes; at most {max_bytes} a request: send fewer groups, or parts of them (offset, "
            "total_bytes)",
            field="groups",
        )
    slices = group_slices(packed)
    if not 1 <= len(slices) <= MAX_GROUPS:
        raise InvalidFieldError(f"groups: {len(slices)} groups; 1 to {MAX_GROUPS} a request", field="groups")
    messages = _parsed(packed) if messages is None else messages
    try:
        return _read(messages, slices)
    except InvalidFieldError:
        # Some group is malformed: check each alone.
        return PutGroups.joined(_read_alone(message, part) for message, part in zip(messages, slices, strict=True))


def _parsed(packed: Packed) -> list[types_pb2.TrajectoryGroup]:
    # Protobuf copies a view's bytes before it reads them, but not the underlying buffer.
    is_whole = isinstance(packed, memoryview) and isinstance(packed.obj, bytearray) and packed.nbytes == len(packed.obj)
    data = packed.obj if isinstance(packed, memoryview) and is_whole else packed
    try:
        return list(types_pb2.TrajectoryGroups.FromString(cast("bytes", data)).groups)
    except DecodeError as error:
        raise InvalidFieldError(f"groups: not a serialized TrajectoryGroups: {error}", field="groups") from error


def _read_alone(message: types_pb2.TrajectoryGroup, part: tuple[int, int]) -> PutGroups:
    try:
        return _read([message], [part])
    except InvalidFieldError as error:
        group_id = message.prompt.group_id
        return PutGroups(
            group_ids=[group_id], slices=[part], faults=[str(error)], num_prompt_tokens=[0], num_samples=[0]
        )


def _read(messages: Sequence[types_pb2.TrajectoryGroup], slices: list[tuple[int, int]]) -> PutGroups:
    """Groups none of which is malformed. Raises InvalidFieldError with the first fault found in any."""
    trajectories = [list(message.trajectories) for message in messages]
    counts = list(map(len, trajectories))
    require(min(counts) >= 1, "trajectories", 0, "at least one a group")
    samples = list(chain.from_iterable(trajectories))
    group_ids, num_prompt_tokens = _check_prompts([message.prompt for message in messages])
    _check_keys(group_ids, counts, samples)
    rewards = _check_outcomes(samples)
    num_tokens = _check_all_arrays(samples, num_bytes=sum(end - start for start, end in slices))
    oldest, newest = _check_versions(samples, num_tokens)
    stated = [message.min_policy_version for message in messages]
    require(stated == _oldest_of_groups(oldest, counts), "min_policy_version", stated[0], "the oldest of its samples")
    return PutGroups(
        group_ids=group_ids,
        slices=slices,
        faults=[""] * len(messages),
        num_prompt_tokens=num_prompt_tokens,
        num_samples=counts,
        sample_tokens=num_tokens,
        min_versions=oldest,
        max_versions=newest,
        rewards=rewards,
    )


def _oldest_of_groups(oldest: list[int], counts: Sequence[int]) -> list[int]:
    """The oldest version of each group's samples."""
    if len(counts) == len(oldest):
        return oldest
    return [min(oldest[end - count : end]) for end, count in zip(accumulate(counts), counts, strict=True)]


def _check_prompts(prompts: Sequence[types_pb2.Prompt]) -> tuple[list[str], list[int]]:
    """Group id and number of tokens of each."""
    group_ids = [prompt.group_id for prompt in prompts]
    for group_id in group_ids:
        check_id("group_id", group_id)
    purposes = {prompt.purpose for prompt in prompts}
    require(purposes == {types_pb2.PURPOSE_TRAIN}, "prompt.purpose", sorted(purposes), "TRAIN")
    for prompt in prompts:
        check_trainable(prompt.sampling, field="prompt.sampling")
    size = max(len(prompt.metadata_json) for prompt in prompts)
    require(size <= MAX_METADATA_BYTES, "prompt.metadata_json", size, f"at most {MAX_METADATA_BYTES} characters")
    token_ids = [prompt.token_ids for prompt in prompts]
    sizes = list(map(len, token_ids))
    require(min(sizes) > 0 and not any(size % 4 for size in sizes), "prompt.token_ids", sizes[0], "int32, not empty")
    _check_token_ids("prompt.token_ids", token_ids)
    return group_ids, [size // 4 for size in sizes]


def _check_keys(group_ids: Sequence[str], counts: Sequence[int], samples: Sequence[types_pb2.Trajectory]) -> None:
    keys = [sample.key for sample in samples]
    named = [key.group_id for key in keys]
    expected = list(chain.from_iterable(map(repeat, group_ids, counts)))
    require(named == expected, "key.group_id", named[0][:80], "the group_id of the group's prompt")
    if len(counts) == len(samples):
        # One per group, whatever its index.
        return
    indices = [key.sample_index for key in keys]
    # Ascending within a group; they may fall where the next group begins.
    falls = {position for position, (index, after) in enumerate(pairwise(indices), 1) if after <= index}
    is_good = falls <= set(accumulate(counts))
    require(is_good, "key.sample_index", indices[:8], "rising inside a group")


def _check_outcomes(samples: Sequence[types_pb2.Trajectory]) -> list[float]:
    """Rewards."""
    scores = [sample.score for sample in samples]
    is_good = all(score.status == _OK and score.HasField("value") for score in scores)
    rewards = [score.value for score in scores]
    require(is_good and all(map(math.isfinite, rewards)), "score", rewards[0], "OK, with a finite value")
    reasons = {sample.finish_reason for sample in samples}
    require(reasons <= _FINISHED, "finish_reason", sorted(reasons), "STOP or LENGTH")
    return rewards


def _check_all_arrays(samples: Sequence[types_pb2.Trajectory], *, num_bytes: int) -> list[int]:
    """Completion tokens of each sample; about CHECKED_BYTES at once, since reading copies them."""
    at_once = max(1, len(samples) * CHECKED_BYTES // max(1, num_bytes))
    return [
        count for start in range(0, len(samples), at_once) for count in _check_arrays(samples[start : start + at_once])
    ]


def _check_arrays(samples: Sequence[types_pb2.Trajectory]) -> list[int]:
    """Completion tokens of each sample."""
    token_ids = [sample.token_ids for sample in samples]
    logprobs = [sample.behavior_logprobs for sample in samples]
    advantages = [sample.advantages for sample in samples]
    sizes = list(map(len, token_ids))
    require(not any(size % 4 for size in sizes), "token_ids", sizes[0], "int32: 4 bytes a token")
    require(list(map(len, logprobs)) == sizes, "behavior_logprobs", len(logprobs[0]), "float32: one a token")
    for size, other in zip(sizes, map(len, advantages), strict=True):
        require(other in (0, size), "advantages", other, "empty, or float32: one a token")
    for size, mask in zip(sizes, [sample.loss_mask for sample in samples], strict=True):
        if mask:
            is_good = len(mask) == size // 4 and not mask.strip(b"\0\1")
            require(is_good, "loss_mask", len(mask), "empty, or a byte of 0 or 1 a token")
    if any(sizes):
        _check_token_ids("token_ids", token_ids)
        for values in _arrays(logprobs, _FLOAT32):
            # A NaN makes either of them NaN, which compares false.
            least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
            is_good = least > -math.inf and most <= MAX_LOGPROB
            require(is_good, "behavior_logprobs", (least, most), "finite and at most 0, in nats")
    if any(advantages):
        for values in _arrays(advantages, _FLOAT32):
            least, most = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
            require(least > -math.inf and most < math.inf, "advantages", (least, most), "finite")
    return [size // 4 for size in sizes]


def _check_token_ids(field: str, parts: Sequence[bytes]) -> None:
    for values in _arrays(parts, _INT32):
        least = int(np.minimum.reduce(values))
        require(least >= 0, field, least, "no negative token ids")


def _arrays(parts: Sequence[bytes], dtype: np.dtype[Any]) -> list[npt.NDArray[Any]]:
    """Arrays with all values of `parts`, which are not all empty: few of small parts, no copies of large ones."""
    if len(parts) > 1 and sum(map(len, parts)) < len(parts) * _LARGE_BYTES:
        return [np.frombuffer(b"".join(parts), dtype)]
    return [np.frombuffer(part, dtype) for part in parts if part]


def _check_versions(samples: Sequence[types_pb2.Trajectory], num_tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Oldest and newest version of each sample; one without tokens has its stated version."""
    runs = [sample.policy_versions for sample in samples]
    parts, lengths_parts = [run.versions for run in runs], [run.lengths for run in runs]
    sizes = list(map(len, lengths_parts))
    is_good = not any(size % 4 for size in sizes) and list(map(len, parts)) == [2 * size for size in sizes]
    require(is_good, "policy_versions", (len(parts[0]), sizes[0]), "int64 versions and as many int32 run lengths")
    require([size > 0 for size in sizes] == [count > 0 for count in num_tokens], "policy_versions", sizes[0], "set")
    oldest = [sample.min_policy_version for sample in samples]
    newest = [sample.max_policy_version for sample in samples]
    require(min(oldest) >= 0, "min_policy_version", min(oldest), "at least 0")
    require(all(map(int.__le__, oldest, newest)), "max_policy_version", newest[0], "not below min_policy_version")
    versions = np.frombuffer(b"".join(parts), _INT64)
    lengths = np.frombuffer(b"".join(lengths_parts), _INT32)
    if versions.tolist() == oldest == newest and lengths.tolist() == num_tokens and all(num_tokens):
        # The common case: each sample has tokens, all of one version. The code below handles any.
        return oldest, newest
    if not versions.size:
        return oldest, newest
    lengths = lengths.astype(np.int64)
    require(int(lengths.min()) >= 1 and int(versions.min()) >= 0, "policy_versions", "", "runs >= 1, versions >= 0")
    # Start of the version runs of each sample that has tokens.
    starts = [end - size // 4 for end, size in zip(accumulate(size // 4 for size in sizes), sizes, strict=True) if size]
    has_tokens = [count > 0 for count in num_tokens]
    totals = np.add.reduceat(lengths, starts).tolist()
    require(totals == [count for count in num_tokens if count], "policy_versions", totals[0], "as many as tokens")
    for field, stated, found in (
        ("min_policy_version", oldest, np.minimum.reduceat(versions, starts)),
        ("max_policy_version", newest, np.maximum.reduceat(versions, starts)),
    ):
        said = [version for version, is_told in zip(stated, has_tokens, strict=True) if is_told]
        require(said == found.tolist(), field, said[0], "what the versions of its tokens say")
    return oldest, newest
