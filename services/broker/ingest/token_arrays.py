"""Checks the arrays of several sequences of tokens together, which costs little more than checking one. Pure.

Each function raises InvalidFieldError with the first fault found in any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import require
from penstock.v1 import types_pb2
from penstock.wire.codec import Packed

MAX_LOGPROB = 1e-3
"""A log-probability is at most 0; engines round a certain token to slightly more."""
LARGE_BYTES = 16 * 1024
"""From this size on, checking an array by itself costs less than copying it together with others."""
_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")


def check_tokens(
    token_ids: Sequence[Packed], logprobs: Sequence[Packed], masks: Sequence[bytes], *, logprobs_field: str
) -> list[int]:
    """Number of tokens of each sequence, from its ids, log-probs and loss mask."""
    sizes = list(map(len, token_ids))
    require(not any(size % 4 for size in sizes), "token_ids", sizes[0], "int32: 4 bytes a token")
    require(list(map(len, logprobs)) == sizes, logprobs_field, len(logprobs[0]), "float32: one a token")
    if any(masks):
        for size, mask in zip(sizes, masks, strict=True):
            is_good = not mask or (len(mask) == size // 4 and not mask.strip(b"\0\1"))
            require(is_good, "loss_mask", len(mask), "empty, or a byte of 0 or 1 a token")
    if any(sizes):
        check_token_ids("token_ids", token_ids)
        check_floats(logprobs_field, logprobs, most=MAX_LOGPROB, expected="finite and at most 0, in nats")
    return [size // 4 for size in sizes]


def check_token_ids(field: str, parts: Sequence[Packed]) -> None:
    """Check ids, which are not all empty."""
    for values in _arrays(parts, _INT32):
        least = int(np.minimum.reduce(values))
        require(least >= 0, field, least, "no negative token ids")


def check_floats(field: str, parts: Sequence[Packed], *, most: float, expected: str) -> None:
    """Check that numbers, which are not all empty, are finite and at most `most`."""
    for values in _arrays(parts, _FLOAT32):
        # A NaN makes either of them NaN, which compares false.
        least, largest = float(np.minimum.reduce(values)), float(np.maximum.reduce(values))
        require(least > -math.inf and largest <= most, field, (least, largest), expected)


def _arrays(parts: Sequence[Packed], dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """Arrays with all values of `parts`, which are not all empty: few of small parts, no copies of large ones.

    A view may begin at any byte, where numpy would copy the array several times, so it is copied once, to where the one
    before was.
    """
    if len(parts) > 1 and sum(map(len, parts)) < len(parts) * LARGE_BYTES:
        yield np.frombuffer(b"".join(parts), dtype)
        return
    for part in parts:
        if part:
            yield np.frombuffer(bytes(part), dtype)


def version_ranges(runs: Sequence[types_pb2.VersionRuns], num_tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Oldest and newest policy version of each sequence that has tokens."""
    parts, lengths_parts = [run.versions for run in runs], [run.lengths for run in runs]
    sizes = list(map(len, lengths_parts))
    is_good = not any(size % 4 for size in sizes) and list(map(len, parts)) == [2 * size for size in sizes]
    require(is_good, "policy_versions", (len(parts[0]), sizes[0]), "int64 versions and as many int32 run lengths")
    counts = [count for count in num_tokens if count]
    is_good = [size > 0 for size in sizes] == [count > 0 for count in num_tokens]
    require(is_good, "policy_versions", sizes[0] // 4, "runs for all tokens, and none without")
    if not counts:
        return [], []
    versions, lengths = np.frombuffer(b"".join(parts), _INT64), np.frombuffer(b"".join(lengths_parts), _INT32)
    of_runs = versions.tolist()
    if lengths.tolist() == counts and min(of_runs) >= 0:
        # The common case: one run each. The code below handles any.
        return of_runs, of_runs
    require(int(lengths.min()) >= 1 and min(of_runs) >= 0, "policy_versions", "", "runs >= 1, versions >= 0")
    starts = [end - size // 4 for end, size in zip(accumulate(size // 4 for size in sizes), sizes, strict=True) if size]
    totals = np.add.reduceat(lengths.astype(np.int64), starts).tolist()
    require(totals == counts, "policy_versions", totals[0], "as many as tokens")
    return np.minimum.reduceat(versions, starts).tolist(), np.maximum.reduceat(versions, starts).tolist()
