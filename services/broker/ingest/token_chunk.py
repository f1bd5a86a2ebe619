"""Checks token chunks once on arrival. Pure.

All checks that need no run state are here; `append_tokens` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress

import numpy as np

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import decode_versions, float32_array, int32_array

MAX_TEXT_BYTES = 8 * 1024 * 1024
"""Bound such that a sample with token ids and prompt fits one message to a reward worker."""
MAX_LOGPROB = 1e-3
"""A log-probability is at most 0; engines round a certain token to slightly more."""
_FINISH_REASONS = frozenset(types_pb2.FinishReason.values())
_Look = tuple[int, int | None, int | None]
"""Number of a chunk's tokens, their oldest and newest version; None if there are none, or they are malformed."""


@dataclass(slots=True, kw_only=True)
class ChunkFacts:
    """The checked properties of a chunk, and the bytes to keep; not frozen, which would triple its creation time."""

    group_id: str
    sample_index: int
    attempt: int
    lease_id: str
    offset: int
    num_tokens: int
    finish_reason: types_pb2.FinishReason.ValueType
    min_version: int | None
    max_version: int | None
    fault: str
    """Why the chunk is malformed; empty if it is valid."""
    payload: bytes
    """The TokenChunk without key and lease."""

    @property
    def end(self) -> int:
        """Completion tokens known once it is stored."""
        return self.offset + self.num_tokens

    def refuse(self, reason: str, next_offset: int, message: str) -> broker_pb2.ChunkError:
        """The answer to a chunk that is not stored."""
        return broker_pb2.ChunkError(
            key=types_pb2.SampleKey(group_id=self.group_id, sample_index=self.sample_index, attempt=self.attempt),
            lease_id=self.lease_id,
            reason=reason,
            next_offset=next_offset,
            message=message,
        )


def read_chunks(chunks: Sequence[types_pb2.TokenChunk]) -> list[ChunkFacts]:
    """Check the arrays of a request's chunks; malformed ones come back with their `fault`. `chunks` are used up.

    One check of all numbers together decides the usual case, in which all are valid: a chunk often has two tokens,
    and checking each alone would cost more than all its other processing.
    """
    are_ordinary = [_is_ordinary(chunk) for chunk in chunks]
    looked_at = _look_if_all_good(list(compress(chunks, are_ordinary)))
    if looked_at is None:
        return [read_chunk(chunk) for chunk in chunks]
    found = iter(looked_at)
    return [
        _facts(chunk, next(found)) if is_ordinary else read_chunk(chunk)
        for chunk, is_ordinary in zip(chunks, are_ordinary, strict=True)
    ]


def _is_ordinary(chunk: types_pb2.TokenChunk) -> bool:
    """Whether it is neither a sample's last chunk nor one with given tokens."""
    return not (chunk.finish_reason or chunk.text or chunk.loss_mask)


def read_chunk(chunk: types_pb2.TokenChunk) -> ChunkFacts:
    """Check one chunk by itself; see `read_chunks`."""
    num_tokens, finish_reason = len(chunk.token_ids) // 4, chunk.finish_reason
    try:
        oldest, newest = _check(chunk) or (None, None)
    except InvalidFieldError as error:
        return _facts(chunk, (num_tokens, None, None), finish_reason, str(error))
    return _facts(chunk, (num_tokens, oldest, newest), finish_reason)


def _facts(
    chunk: types_pb2.TokenChunk,
    look: _Look,
    finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED,
    fault: str = "",
) -> ChunkFacts:
    num_tokens, oldest, newest = look
    key = chunk.key
    group_id, sample_index, attempt, lease_id = key.group_id, key.sample_index, key.attempt, chunk.lease_id
    chunk.ClearField("key")
    chunk.ClearField("lease_id")
    return ChunkFacts(
        group_id=group_id,
        sample_index=sample_index,
        attempt=attempt,
        lease_id=lease_id,
        offset=chunk.offset,
        num_tokens=num_tokens,
        finish_reason=finish_reason,
        min_version=oldest,
        max_version=newest,
        fault=fault,
        payload=chunk.SerializeToString(),
    )


def _look_if_all_good(chunks: Sequence[types_pb2.TokenChunk]) -> list[_Look] | None:
    """The token statistics of each chunk; None if it is malformed or empty."""
    token_ids, logprobs = [chunk.token_ids for chunk in chunks], [chunk.logprobs for chunk in chunks]
    runs = [chunk.policy_versions for chunk in chunks]
    parts, lengths_parts = [run.versions for run in runs], [run.lengths for run in runs]
    sizes, run_sizes = list(map(len, token_ids)), list(map(len, lengths_parts))
    is_sound = (
        all(size and not size % 4 for size in (*sizes, *run_sizes))
        and list(map(len, logprobs)) == sizes
        and list(map(len, parts)) == [2 * size for size in run_sizes]
    )
    if not chunks or not is_sound:
        return [] if not chunks else None
    ids, probabilities = np.frombuffer(b"".join(token_ids), "<i4"), np.frombuffer(b"".join(logprobs), "<f4")
    versions, lengths = np.frombuffer(b"".join(parts), "<i8"), np.frombuffer(b"".join(lengths_parts), "<i4")
    starts = [0, *accumulate(size // 4 for size in run_sizes[:-1])]
    num_tokens = [size // 4 for size in sizes]
    is_good = (
        int(ids.min()) >= 0
        # A NaN makes either of them NaN, which compares false.
        and float(probabilities.max()) <= MAX_LOGPROB
        and float(probabilities.min()) > -math.inf
        and int(lengths.min()) >= 1
        and int(versions.min()) >= 0
        and np.add.reduceat(lengths.astype(np.int64), starts).tolist() == num_tokens
    )
    if not is_good:
        return None
    oldest, newest = np.minimum.reduceat(versions, starts), np.maximum.reduceat(versions, starts)
    return list(zip(num_tokens, oldest.tolist(), newest.tolist(), strict=True))


def _check(chunk: types_pb2.TokenChunk) -> tuple[int, int] | None:
    """Oldest and newest version of the tokens, None if there are none. Raises InvalidFieldError."""
    if chunk.finish_reason not in _FINISH_REASONS:
        raise InvalidFieldError(f"finish_reason: {chunk.finish_reason} is not known", field="finish_reason")
    if chunk.text and (not chunk.finish_reason or _is_longer(chunk.text, MAX_TEXT_BYTES)):
        raise InvalidFieldError(f"text: set in the last chunk only, at most {MAX_TEXT_BYTES} bytes", field="text")
    token_ids = int32_array(chunk.token_ids, "token_ids")
    logprobs = float32_array(chunk.logprobs, "logprobs")
    num_tokens = token_ids.size
    if logprobs.size != num_tokens:
        raise InvalidFieldError(f"logprobs: {logprobs.size} for {num_tokens} tokens", field="logprobs")
    if len(chunk.loss_mask) not in (0, num_tokens) or chunk.loss_mask.strip(b"\0\1"):
        raise InvalidFieldError(f"loss_mask: must be empty or {num_tokens} bytes of 0 or 1", field="loss_mask")
    versions = decode_versions(chunk.policy_versions, num_tokens=num_tokens, field="policy_versions")
    if num_tokens == 0:
        if not chunk.finish_reason:
            raise InvalidFieldError("token_ids: empty in a chunk that does not end the sample", field="token_ids")
        return None
    if int(token_ids.min()) < 0:
        raise InvalidFieldError("token_ids: must not be negative", field="token_ids")
    # A NaN makes the maximum NaN, which compares false; -inf is caught by the minimum.
    if not float(logprobs.max()) <= MAX_LOGPROB or not np.isfinite(logprobs.min()):
        raise InvalidFieldError("logprobs: must be finite and at most 0, in nats", field="logprobs")
    return int(versions.min()), int(versions.max())


def _is_longer(text: str, num_bytes: int) -> bool:
    """Whether text takes more than this many bytes as UTF-8, which has at most 4 per character."""
    return 4 * len(text) > num_bytes and len(text.encode()) > num_bytes
