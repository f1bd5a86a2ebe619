"""Buffers the tokens of one leased sample for the broker: appended as they are decoded, sent as chunks.

A stream ends once: settled (its last chunk is stored), refused (by the broker), or discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import Float32, Int32, float32_bytes, int32_bytes

MAX_TOKENS_PER_CHUNK = 16_384
MAX_TEXT_BYTES = 8 * 1024 * 1024
"""The broker's limit, 8 bytes per token of the longest completion; longer text is cut for the reward model."""
_BYTES_PER_TOKEN = 8
_Number = TypeVar("_Number", np.int32, np.float32)


def cut_text(text: str) -> str:
    """A completion's text, cut to the limit of the broker and of reward models."""
    return text.encode("utf-8", errors="replace")[:MAX_TEXT_BYTES].decode("utf-8", errors="ignore")


class StreamListener(Protocol):
    """Owner of a SampleStream. Neither method waits."""

    def settled(self) -> None:
        """The last chunk is stored: the lease is done."""

    def refused(self, error: broker_pb2.ChunkError) -> None:
        """The broker refused the tokens; `error.reason` says what to do."""


class SampleStream:
    """Made by `TokenSession.open`.

    Args:
        key: Which sample.
        lease_id: The lease under which it is decoded.
        offset: Completion tokens that the broker already has.
        listener: Notified of its end.
        on_change: Called with the stream and the change of its buffer in bytes.
    """

    def __init__(
        self,
        key: types_pb2.SampleKey,
        *,
        lease_id: str,
        offset: int,
        listener: StreamListener,
        on_change: Callable[[SampleStream, int], None],
    ) -> None:
        self.lease_id = lease_id
        self.is_closed = False
        """Whether it ended; tokens appended afterwards are ignored."""
        self._is_finished = False
        self._key = key
        self._offset = offset
        self._listener = listener
        self._on_change = on_change
        self._token_ids: list[Int32] = []
        self._logprobs: list[Float32] = []
        self._versions: list[int] = []
        self._num_tokens = 0
        self._text = b""
        self._finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def num_tokens(self) -> int:
        """Completion tokens so far: stored by the broker, in flight, and buffered."""
        return self._offset + self._num_tokens

    @property
    def buffered_bytes(self) -> int:
        """Approximate size of the next chunks on the wire."""
        return self._num_tokens * _BYTES_PER_TOKEN + len(self._text)

    @property
    def is_dirty(self) -> bool:
        """Whether there is something to send."""
        return self._num_tokens > 0 or self._finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED

    def append(self, token_ids: Int32, logprobs: Float32, *, policy_version: int) -> None:
        """Append tokens [n] and log-probs [n] sampled by one policy version; ignored after `finish`."""
        if self.is_closed or self._is_finished or not len(token_ids):
            return
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probs")
        self._token_ids.append(token_ids)
        self._logprobs.append(logprobs)
        self._versions.append(policy_version)
        self._num_tokens += len(token_ids)
        self._on_change(self, len(token_ids) * _BYTES_PER_TOKEN)

    def finish(self, reason: types_pb2.FinishReason.ValueType, *, text: str = "") -> None:
        """Set the finish reason, of which only the first counts; `text` is the whole completion."""
        if self.is_closed or self._is_finished:
            return
        self._is_finished = True
        self._finish_reason = reason
        self._text = cut_text(text).encode()
        self._on_change(self, len(self._text))

    def discard(self) -> None:
        """Discard unsent tokens; the listener is not called again."""
        if self.is_closed:
            return
        self.is_closed = True
        freed_bytes = self.buffered_bytes
        self._clear()
        self._on_change(self, -freed_bytes)

    def settle(self) -> None:
        """For the session: the last chunk is stored."""
        if not self.is_closed:
            self.is_closed = True
            self._listener.settled()

    def refuse(self, error: broker_pb2.ChunkError) -> None:
        """For the session: a chunk was refused."""
        if not self.is_closed:
            self.discard()
            self._listener.refused(error)

    def take_chunk(self) -> types_pb2.TokenChunk:
        """For the session: the next chunk, at most MAX_TOKENS_PER_CHUNK tokens; the finish reason comes in the last."""
        token_ids, logprobs = _join(self._token_ids, np.int32), _join(self._logprobs, np.float32)
        lengths = [len(part) for part in self._token_ids]
        num_taken = min(len(token_ids), MAX_TOKENS_PER_CHUNK)
        taken, rest = _split_runs(self._versions, lengths, num_taken)
        chunk = types_pb2.TokenChunk(
            key=self._key,
            lease_id=self.lease_id,
            offset=self._offset,
            token_ids=int32_bytes(token_ids[:num_taken]),
            logprobs=float32_bytes(logprobs[:num_taken]),
            policy_versions=_version_runs(taken),
        )
        self._offset += num_taken
        if num_taken == len(token_ids):
            chunk.finish_reason = self._finish_reason
            chunk.text = self._text.decode()
            self._clear()
        else:
            self._token_ids, self._logprobs = [], []
            begin = num_taken
            for _, length in rest:
                self._token_ids.append(token_ids[begin : begin + length])
                self._logprobs.append(logprobs[begin : begin + length])
                begin += length
            self._versions = [version for version, _ in rest]
            self._num_tokens -= num_taken
        return chunk

    def _clear(self) -> None:
        self._token_ids, self._logprobs, self._versions = [], [], []
        self._num_tokens = 0
        self._text = b""
        self._finish_reason = types_pb2.FINISH_REASON_UNSPECIFIED


def _join(parts: list[npt.NDArray[_Number]], dtype: type[_Number]) -> npt.NDArray[_Number]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _split_runs(
    versions: list[int], lengths: list[int], num_taken: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Split (version, length) runs into those of the first `num_taken` tokens and those of the others."""
    taken: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    left = num_taken
    for version, length in zip(versions, lengths, strict=True):
        first = min(left, length)
        left -= first
        if first:
            taken.append((version, first))
        if length > first:
            rest.append((version, length - first))
    return taken, rest


def _version_runs(runs: list[tuple[int, int]]) -> types_pb2.VersionRuns:
    versions: list[int] = []
    lengths: list[int] = []
    for version, length in runs:
        if versions and versions[-1] == version:
            lengths[-1] += length
        else:
            versions.append(version)
            lengths.append(length)
    return types_pb2.VersionRuns(
        versions=np.asarray(versions, "<i8").tobytes(), lengths=np.asarray(lengths, "<i4").tobytes()
    )
