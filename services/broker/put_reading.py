"""A put request, checked once on arrival. Pure.

Everything that can be judged without the run's state is judged here, over the arrays of the whole request at once;
`parcels` does the rest. The trajectories are not read again after that: what is kept of them are their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from penstock.codec import group_slices
from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2
from services.broker.chunks import MAX_LOGPROB
from services.broker.validation import MAX_METADATA_BYTES, check_id

MAX_GROUPS = 1_024
MAX_BYTES = 4 * 1024 * 1024
_OK = types_pb2.SCORE_STATUS_OK
_FINISHED = frozenset((types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH))
_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
_Bools = npt.NDArray[np.bool_]


@dataclass(slots=True, kw_only=True)
class PutGroup:
    """What decides about a group of a put."""

    group_id: str
    start: int
    end: int
    """Where it stands in the request's bytes."""
    num_prompt_tokens: int
    sample_tokens: list[int] = field(default_factory=list)
    """Completion tokens of each sample."""
    min_versions: list[int] = field(default_factory=list)
    max_versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    fault: str = ""
    """Why it is malformed; empty when it is not."""


@dataclass(slots=True)
class _Arrays:
    """The arrays of what is well formed so far, and whose they are."""

    prompt_group: list[int] = field(default_factory=list)
    prompt_ids: list[bytes] = field(default_factory=list)

    group: list[int] = field(default_factory=list)
    """Position of each sample's group in the request."""
    token_ids: list[bytes] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    advantages: list[bytes] = field(default_factory=list)
    versions: list[bytes] = field(default_factory=list)
    lengths: list[bytes] = field(default_factory=list)
    stated: list[tuple[int, int]] = field(default_factory=list)
    """Oldest and newest version as each sample states them."""


def read_put(packed: bytes) -> list[PutGroup]:
    """The groups of a request, each with its `fault` where it is malformed.

    Raises InvalidFieldError where the request as a whole cannot be read.
    """
    if len(packed) > MAX_BYTES:
        raise InvalidFieldError(f"groups: {len(packed)} bytes; at most {MAX_BYTES}: send fewer groups", field="groups")
    slices = group_slices(packed)
    if not 1 <= len(slices) <= MAX_GROUPS:
        raise InvalidFieldError(f"groups: {len(slices)} groups; 1 to {MAX_GROUPS} a request", field="groups")
    try:
        messages = types_pb2.TrajectoryGroups.FromString(packed).groups
    except DecodeError as error:
        raise InvalidFieldError(f"groups: not a serialized TrajectoryGroups: {error}", field="groups") from error
    groups: list[PutGroup] = []
    arrays = _Arrays()
    for position, (message, (start, end)) in enumerate(zip(messages, slices, strict=True)):
        group = PutGroup(
            group_id=message.prompt.group_id,
            start=start,
            end=end,
            num_prompt_tokens=len(message.prompt.token_ids) // 4,
        )
        groups.append(group)
        try:
            arrays.prompt_ids.append(_check_prompt(message.prompt))
            arrays.prompt_group.append(position)
            _read_samples(message, group, position, arrays)
        except InvalidFieldError as error:
            group.fault = str(error)
    _check_arrays(groups, arrays)
    for group, message in zip(groups, messages, strict=True):
        if not group.fault and message.min_policy_version != min(group.min_versions):
            group.fault = f"min_policy_version: {message.min_policy_version}; its tokens say {min(group.min_versions)}"
    return groups


def _check_prompt(prompt: types_pb2.Prompt) -> bytes:
    """Raises InvalidFieldError; returns the prompt's token ids, which are looked at together with all others."""
    check_id("group_id", prompt.group_id)
    if prompt.purpose != types_pb2.PURPOSE_TRAIN:
        raise InvalidFieldError(f"prompt.purpose: {prompt.purpose}; must be TRAIN", field="prompt.purpose")
    token_ids = prompt.token_ids
    if not token_ids or len(token_ids) % 4:
        message = f"prompt.token_ids: {len(token_ids)} bytes; must be int32, at least one"
        raise InvalidFieldError(message, field="prompt.token_ids")
    if len(prompt.metadata_json) > MAX_METADATA_BYTES:
        message = f"prompt.metadata_json: {len(prompt.metadata_json)} characters; at most {MAX_METADATA_BYTES} bytes"
        raise InvalidFieldError(message, field="prompt.metadata_json")
    return token_ids


def _read_samples(message: types_pb2.TrajectoryGroup, group: PutGroup, position: int, arrays: _Arrays) -> None:
    """Check the shapes of a group's trajectories and note their arrays; a fault keeps the whole group out."""
    if not message.trajectories:
        raise InvalidFieldError("trajectories: a group has at least one", field="trajectories")
    last_index = -1
    for sample in message.trajectories:
        key = sample.key
        if key.group_id != group.group_id or key.sample_index <= last_index:
            text = f"key: {key.group_id!r}/{key.sample_index}; must be the group's, in the order of sample_index"
            raise InvalidFieldError(text, field="trajectories.key")
        last_index = key.sample_index
        _check_outcome(sample)
        token_ids, logprobs, advantages = sample.token_ids, sample.behavior_logprobs, sample.advantages
        size = len(token_ids)
        if size % 4 or len(logprobs) != size or len(advantages) not in (0, size):
            text = f"token_ids, behavior_logprobs, advantages: {size}, {len(logprobs)}, {len(advantages)} bytes"
            raise InvalidFieldError(f"{text}; must be 4 a token (advantages may be empty)", field="trajectories")
        mask = sample.loss_mask
        if mask and (len(mask) != size // 4 or mask.strip(b"\0\1")):
            raise InvalidFieldError("loss_mask: must be empty, or a byte of 0 or 1 a token", field="loss_mask")
        runs = sample.policy_versions
        versions, lengths = runs.versions, runs.lengths
        if len(lengths) % 4 or len(versions) != 2 * len(lengths) or bool(lengths) != bool(size):
            text = f"policy_versions: {len(versions)} bytes of versions, {len(lengths)} of run lengths"
            raise InvalidFieldError(f"{text}; must be 8 and 4 a run", field="policy_versions")
        group.sample_tokens.append(size // 4)
        group.rewards.append(sample.score.value)
        arrays.group.append(position)
        arrays.token_ids.append(token_ids)
        arrays.logprobs.append(logprobs)
        arrays.advantages.append(advantages)
        arrays.versions.append(versions)
        arrays.lengths.append(lengths)
        arrays.stated.append((sample.min_policy_version, sample.max_policy_version))


def _check_outcome(sample: types_pb2.Trajectory) -> None:
    score = sample.score
    if score.status != _OK or not score.HasField("value") or not math.isfinite(score.value):
        raise InvalidFieldError("score: must be OK with a finite value", field="score")
    if sample.finish_reason not in _FINISHED:
        raise InvalidFieldError(f"finish_reason: {sample.finish_reason}; must be STOP or LENGTH", field="finish_reason")


def _check_arrays(groups: Sequence[PutGroup], arrays: _Arrays) -> None:
    """Check the numbers of all samples together; note their versions, and what is wrong with whom."""
    num_tokens = [len(data) // 4 for data in arrays.token_ids]
    prompt_ids = np.frombuffer(b"".join(arrays.prompt_ids), _INT32)
    token_ids = np.frombuffer(b"".join(arrays.token_ids), _INT32)
    logprobs = np.frombuffer(b"".join(arrays.logprobs), _FLOAT32)
    advantages = np.frombuffer(b"".join(arrays.advantages), _FLOAT32)
    # One look at everything decides the usual case. A NaN makes a maximum NaN, which compares false.
    if prompt_ids.size and int(prompt_ids.min()) < 0:
        counts = [len(data) // 4 for data in arrays.prompt_ids]
        _blame(groups, arrays.prompt_group, counts, prompt_ids < 0, "prompt.token_ids: must not be negative")
    if token_ids.size and int(token_ids.min()) < 0:
        _blame(groups, arrays.group, num_tokens, token_ids < 0, "token_ids: must not be negative")
    if logprobs.size and not (float(logprobs.max()) <= MAX_LOGPROB and np.isfinite(logprobs.min())):
        is_bad = ~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))
        fault = "behavior_logprobs: must be finite and at most 0, in nats"
        _blame(groups, arrays.group, num_tokens, is_bad, fault)
    if advantages.size and not np.isfinite(float(advantages.sum(dtype=np.float64))):
        counts = [len(data) // 4 for data in arrays.advantages]
        _blame(groups, arrays.group, counts, ~np.isfinite(advantages), "advantages: must be finite")
    _check_versions(groups, arrays, num_tokens)


def _check_versions(groups: Sequence[PutGroup], arrays: _Arrays, num_tokens: Sequence[int]) -> None:
    versions = np.frombuffer(b"".join(arrays.versions), _INT64)
    lengths = np.frombuffer(b"".join(arrays.lengths), _INT32).astype(np.int64)
    counts = [len(data) // 4 for data in arrays.lengths]
    starts = [end - count for end, count in zip(accumulate(counts), counts, strict=True) if count]
    oldest, newest, total = (
        iter(reduce(values, starts).tolist() if starts else ())
        for reduce, values in (
            (np.minimum.reduceat, versions),
            (np.maximum.reduceat, versions),
            (np.add.reduceat, lengths),
        )
    )
    is_bad = (lengths < 1) | (versions < 0)
    if is_bad.any():
        fault = "policy_versions: run lengths must be >= 1 and versions >= 0"
        _blame(groups, arrays.group, counts, is_bad, fault)
    for position, count, tokens, stated in zip(arrays.group, counts, num_tokens, arrays.stated, strict=True):
        group = groups[position]
        found = (next(oldest), next(newest)) if count else stated
        if count and next(total) != tokens:
            group.fault = group.fault or f"policy_versions: run lengths do not add up to {tokens} tokens"
        if stated != found or found[0] > found[1] or found[0] < 0:
            group.fault = group.fault or (
                f"min_policy_version, max_policy_version: {stated[0]} and {stated[1]}; its tokens say {found}"
            )
        group.min_versions.append(found[0])
        group.max_versions.append(found[1])


def _blame(
    groups: Sequence[PutGroup], owners: Sequence[int], counts: Sequence[int], is_bad: _Bools, fault: str
) -> None:
    """Note a fault with every group that has a bad element; sample i of group `owners[i]` has `counts[i]` elements."""
    for position in np.unique(np.repeat(np.asarray(owners), np.asarray(counts))[is_bad]):
        groups[position].fault = groups[position].fault or fault
