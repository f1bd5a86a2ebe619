"""Checks and decodes put requests once on arrival. Pure.

All checks that need no run state are here, over all samples of the request at once; `append_trajectories` does the
rest. The trajectories are not parsed again: only their bytes are kept (`put_messages` parses them).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import accumulate, chain, compress, pairwise, repeat
from typing import cast

from google.protobuf.message import DecodeError

from penstock.errors import InvalidFieldError, require
from penstock.v1 import types_pb2
from penstock.wire.codec import Packed, group_slices
from penstock.wire.routes import read_facts
from penstock.wire.sampling_rules import check_trainable
from penstock.wire.score_rules import MAX_REWARD
from services.broker.ingest.put_messages import Arrays, PutMessages, parse_long
from services.broker.ingest.token_arrays import check_floats, check_token_ids, check_tokens, version_ranges
from services.broker.ingest.trajectory_columns import PutGroups
from services.broker.ingest.validation import MAX_METADATA_BYTES, check_ids

MAX_GROUPS = 1_024
MAX_BYTES = 4 * 1024 * 1024
CHECKED_BYTES = 8 * 1024 * 1024
_OK = types_pb2.SCORE_STATUS_OK
_FINISHED = frozenset((types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH))


def read_put(packed: Packed, messages: PutMessages | None = None, *, max_bytes: int = MAX_BYTES) -> PutGroups:
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
    messages = messages or parse_long(packed) or PutMessages.of(_parsed(packed))
    try:
        return _read(messages, slices)
    except InvalidFieldError:
        # Some group is malformed: check each alone.
        groups = messages.groups if messages.arrays is None else _parsed(packed)
        return PutGroups.joined(_read_alone(group, part) for group, part in zip(groups, slices, strict=True))


def _parsed(packed: Packed) -> list[types_pb2.TrajectoryGroup]:
    # Protobuf copies a view's bytes before it reads them, but not the underlying buffer.
    is_whole = isinstance(packed, memoryview) and isinstance(packed.obj, bytearray) and packed.nbytes == len(packed.obj)
    data = packed.obj if isinstance(packed, memoryview) and is_whole else packed
    try:
        return list(types_pb2.TrajectoryGroups.FromString(cast("bytes", data)).groups)
    except DecodeError as error:
        raise InvalidFieldError(f"groups: not a serialized TrajectoryGroups: {error}", field="groups") from error


def _read_alone(group: types_pb2.TrajectoryGroup, part: tuple[int, int]) -> PutGroups:
    try:
        return _read(PutMessages.of([group]), [part])
    except InvalidFieldError as error:
        group_id = group.prompt.group_id
        return PutGroups(
            group_ids=[group_id], slices=[part], faults=[str(error)], num_prompt_tokens=[0], num_samples=[0]
        )


def _read(messages: PutMessages, slices: list[tuple[int, int]]) -> PutGroups:
    """Groups none of which is malformed. Raises InvalidFieldError with the first fault found in any."""
    counts = list(map(len, messages.samples))
    require(min(counts) >= 1, "trajectories", 0, "at least one a group")
    samples = list(chain.from_iterable(messages.samples))
    group_ids, num_prompt_tokens = _check_prompts([group.prompt for group in messages.groups])
    _check_keys(group_ids, counts, samples)
    rewards = _check_outcomes(samples)
    num_tokens = _check_all_arrays(messages, samples, num_bytes=sum(end - start for start, end in slices))
    oldest, newest = _check_versions(samples, num_tokens)
    stated = [group.min_policy_version for group in messages.groups]
    require(stated == _oldest_of_groups(oldest, counts), "min_policy_version", stated[0], "the oldest of its samples")
    return PutGroups(
        group_ids=group_ids,
        slices=slices,
        faults=[""] * len(group_ids),
        num_prompt_tokens=num_prompt_tokens,
        num_samples=counts,
        sample_tokens=num_tokens,
        min_versions=oldest,
        max_versions=newest,
        rewards=rewards,
        routes=[read_facts(sample.routes) for sample in samples],
    )


def _oldest_of_groups(oldest: list[int], counts: Sequence[int]) -> list[int]:
    """The oldest version of each group's samples."""
    if len(counts) == len(oldest):
        return oldest
    return [min(oldest[end - count : end]) for end, count in zip(accumulate(counts), counts, strict=True)]


def _check_prompts(prompts: Sequence[types_pb2.Prompt]) -> tuple[list[str], list[int]]:
    """Group id and number of tokens of each."""
    group_ids = [prompt.group_id for prompt in prompts]
    check_ids("group_id", group_ids)
    purposes = {prompt.purpose for prompt in prompts}
    require(purposes == {types_pb2.PURPOSE_TRAIN}, "prompt.purpose", sorted(purposes), "TRAIN")
    # Nearly always all alike, and comparing costs less than checking.
    for sampling in {each.SerializeToString(): each for each in [prompt.sampling for prompt in prompts]}.values():
        check_trainable(sampling, field="prompt.sampling")
    size = max(len(prompt.metadata_json) for prompt in prompts)
    require(size <= MAX_METADATA_BYTES, "prompt.metadata_json", size, f"at most {MAX_METADATA_BYTES} characters")
    token_ids = [prompt.token_ids for prompt in prompts]
    sizes = list(map(len, token_ids))
    require(min(sizes) > 0 and not any(size % 4 for size in sizes), "prompt.token_ids", sizes[0], "int32, not empty")
    check_token_ids("prompt.token_ids", token_ids)
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
    # Not by `is_reward`, as there are many.
    is_good = is_good and all(map(math.isfinite, rewards)) and max(map(abs, rewards)) <= MAX_REWARD
    require(is_good, "score", rewards[:8], f"OK, with finite values of at most {MAX_REWARD:g} in magnitude")
    reasons = {sample.finish_reason for sample in samples}
    require(reasons <= _FINISHED, "finish_reason", sorted(reasons), "STOP or LENGTH")
    return rewards


def _check_all_arrays(messages: PutMessages, samples: Sequence[types_pb2.Trajectory], *, num_bytes: int) -> list[int]:
    """Completion tokens of each sample; about CHECKED_BYTES at once, since reading copies them."""
    at_once = max(1, len(samples) * CHECKED_BYTES // max(1, num_bytes))
    num_tokens: list[int] = []
    for start in range(0, len(samples), at_once):
        some = samples[start : start + at_once]
        num_tokens += _check_arrays(messages.arrays_of(some, start), [sample.loss_mask for sample in some])
    return num_tokens


def _check_arrays(arrays: Arrays, masks: Sequence[bytes]) -> list[int]:
    """Completion tokens of each sample."""
    num_tokens = check_tokens(arrays.token_ids, arrays.logprobs, masks, logprobs_field="behavior_logprobs")
    for count, size in zip(num_tokens, map(len, arrays.advantages), strict=True):
        require(size in (0, 4 * count), "advantages", size, "empty, or float32: one a token")
    if any(arrays.advantages):
        check_floats("advantages", arrays.advantages, most=sys.float_info.max, expected="finite")
    return num_tokens


def _check_versions(samples: Sequence[types_pb2.Trajectory], num_tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Oldest and newest version of each sample; one without tokens has its stated version."""
    oldest = [sample.min_policy_version for sample in samples]
    newest = [sample.max_policy_version for sample in samples]
    require(min(oldest) >= 0, "min_policy_version", min(oldest), "at least 0")
    require(all(map(int.__le__, oldest, newest)), "max_policy_version", newest[0], "not below min_policy_version")
    of_tokens = version_ranges([sample.policy_versions for sample in samples], num_tokens)
    for field, stated, found in zip(
        ("min_policy_version", "max_policy_version"), (oldest, newest), of_tokens, strict=True
    ):
        of_sampled = list(compress(stated, num_tokens))
        require(of_sampled == found, field, of_sampled[:1], "what the versions of its tokens say")
    return oldest, newest
