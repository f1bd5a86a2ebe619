"""A token chunk, checked once on arrival. Pure.

Everything that can be judged without the run's state is judged here; `generation` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.codec import decode_versions, float32_array, int32_array
from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2

MAX_TEXT_BYTES = 1024 * 1024
MAX_LOGPROB = 1e-3
"""A log-probability is at most 0; engines round a certain token to slightly more."""
_FINISH_REASONS = frozenset(types_pb2.FinishReason.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFacts:
    """What decides about a chunk, and the bytes to keep of it."""

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
    """Why the chunk is malformed; empty when it is not."""
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


def read_chunk(chunk: types_pb2.TokenChunk) -> ChunkFacts:
    """Check a chunk's arrays; a malformed one comes back with its `fault`. `chunk` is used up."""
    group_id, sample_index, attempt = chunk.key.group_id, chunk.key.sample_index, chunk.key.attempt
    lease_id = chunk.lease_id
    fault, versions = "", None
    try:
        versions = _check(chunk)
    except InvalidFieldError as error:
        fault = str(error)
    chunk.ClearField("key")
    chunk.ClearField("lease_id")
    return ChunkFacts(
        group_id=group_id,
        sample_index=sample_index,
        attempt=attempt,
        lease_id=lease_id,
        offset=chunk.offset,
        num_tokens=len(chunk.token_ids) // 4,
        finish_reason=chunk.finish_reason,
        min_version=versions[0] if versions else None,
        max_version=versions[1] if versions else None,
        fault=fault,
        payload=chunk.SerializeToString(),
    )


def _check(chunk: types_pb2.TokenChunk) -> tuple[int, int] | None:
    """Oldest and newest version of the tokens, None when there are none. Raises InvalidFieldError."""
    if chunk.finish_reason not in _FINISH_REASONS:
        raise InvalidFieldError(f"finish_reason: {chunk.finish_reason} is not known", field="finish_reason")
    if chunk.text and (not chunk.finish_reason or len(chunk.text) > MAX_TEXT_BYTES):
        raise InvalidFieldError("text: set in the last chunk only, at most 1 MiB", field="text")
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
