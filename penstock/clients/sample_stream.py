"""Buffers the tokens of one leased sample for the broker: appended as they are decoded, sent as chunks.

A stream ends once: settled (its last chunk is stored), refused (by the broker), or discarded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import Float32, Int32, float32_bytes, int32_bytes
from penstock.wire.routes import Routes

MAX_TOKENS_PER_CHUNK = 16_384
MAX_TEXT_BYTES = 8 * 1024 * 1024
"""The broker's limit, 8 bytes per token of the longest completion; longer text is cut for the reward model."""
MAX_ROUTE_BYTES_PER_CHUNK = 2 * 1024 * 1024
"""Of the rows of its tokens; those of a prompt come with its first ones."""
_BYTES_PER_TOKEN = 8
_Part = tuple[int, Int32, Float32, Routes | None, bool]
"""The version, tokens, log-probs and routes of one `append`, or the rest of them, and whether they were sampled."""
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
        token_shard: The lease's.
    """

    def __init__(
        self,
        key: types_pb2.SampleKey,
        *,
        lease_id: str,
        offset: int,
        listener: StreamListener,
        on_change: Callable[[SampleStream, int], None],
        token_shard: int = 0,
    ) -> None:
        self.lease_id = lease_id
        self.token_shard = token_shard
        self.is_closed = False
        """Whether it ended; tokens appended afterwards are ignored."""
        self._is_finished = False
        self._key = key
        self._offset = offset
        self._listener = listener
        self._on_change = on_change
        self._parts: deque[_Part] = deque()
        self._num_tokens = self._route_bytes = 0
        self._text = b""
        self._score: types_pb2.Score | None = None
        self._finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
        self.is_urgent = False
        """Whether a caller waits for its tokens to be stored."""
        self._num_stored = offset
        self._stored = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        """Completion tokens so far: stored by the broker, in flight, and buffered."""
        return self._offset + self._num_tokens

    @property
    def buffered_bytes(self) -> int:
        """Approximate size of the next chunks on the wire."""
        return self._num_tokens * _BYTES_PER_TOKEN + self._route_bytes + len(self._text)

    @property
    def is_dirty(self) -> bool:
        """Whether there is something to send."""
        return self._num_tokens > 0 or self._finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED

    def append(
        self,
        token_ids: Int32,
        logprobs: Float32,
        *,
        policy_version: int,
        routes: Routes | None = None,
        is_sampled: bool = True,
    ) -> None:
        """Append tokens [n] and log-probs [n] sampled by one policy version; ignored after `finish`.

        Tokens that were given, not sampled, are never trained on.

        `routes` has a row for each token, after those of the prompt where these are the sample's first tokens.
        """
        if self.is_closed or self._is_finished or not len(token_ids):
            return
        if len(token_ids) != len(logprobs):
            raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probs")
        if routes is not None and len(routes) < len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens with {len(routes)} rows of routes")
        before_bytes = self.buffered_bytes
        self._parts.append((policy_version, token_ids, logprobs, routes, is_sampled))
        self._num_tokens += len(token_ids)
        self._route_bytes += 0 if routes is None else routes.nbytes
        self._on_change(self, self.buffered_bytes - before_bytes)

    def finish(
        self, reason: types_pb2.FinishReason.ValueType, *, text: str = "", score: types_pb2.Score | None = None
    ) -> None:
        """Set the finish reason, of which only the first counts; `text` is the whole completion.

        `score` is what the sample's environment gave it; without one a reward worker scores it.
        """
        if self.is_closed or self._is_finished:
            return
        self._is_finished = True
        self._finish_reason, self._score = reason, score
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

    async def wait_until_stored(self) -> None:
        """Wait until the broker has every token so far, and have them sent at once; for ever if they are refused."""
        self.is_urgent = True
        try:
            self._on_change(self, 0)
            while self._num_stored < self.num_tokens:
                self._stored.clear()
                await self._stored.wait()
        finally:
            self.is_urgent = False

    def note_stored(self, num_tokens: int) -> None:
        """Called by the session: `num_tokens` of the sample's tokens are stored."""
        self._num_stored = max(self._num_stored, num_tokens)
        self._stored.set()

    def follow(self, on_change: Callable[[SampleStream, int], None]) -> None:
        """For the session: another one sends it from now on."""
        self._on_change = on_change

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
        taken = self._take_parts()
        token_ids = _join([part[1] for part in taken], np.int32)
        logprobs = _join([part[2] for part in taken], np.float32)
        chunk = types_pb2.TokenChunk(
            key=self._key,
            lease_id=self.lease_id,
            offset=self._offset,
            token_ids=int32_bytes(token_ids),
            logprobs=float32_bytes(logprobs),
            policy_versions=_version_runs(taken),
            token_shard=self.token_shard,
            routes=b"".join([routes.tobytes() for _, _, _, routes, _ in taken if routes is not None]),
            loss_mask=_mask(taken),
        )
        self._offset += len(token_ids)
        self._num_tokens -= len(token_ids)
        self._route_bytes -= len(chunk.routes)
        if not self._parts:
            chunk.finish_reason = self._finish_reason
            chunk.text = self._text.decode()
            if self._score is not None:
                chunk.score.CopyFrom(self._score)
            self._clear()
        return chunk

    def _take_parts(self) -> list[_Part]:
        taken: list[_Part] = []
        room = MAX_TOKENS_PER_CHUNK
        while self._parts and room:
            version, token_ids, logprobs, routes, is_sampled = self._parts.popleft()
            if routes is not None:
                room = min(room, max(1, MAX_ROUTE_BYTES_PER_CHUNK // routes[0].nbytes))
            if len(token_ids) > room:
                # Rows of the prompt come before those of the tokens.
                rest = None if routes is None else routes[len(routes) - len(token_ids) + room :]
                self._parts.appendleft((version, token_ids[room:], logprobs[room:], rest, is_sampled))
                token_ids, logprobs = token_ids[:room], logprobs[:room]
                routes = None if routes is None or rest is None else routes[: len(routes) - len(rest)]
            taken.append((version, token_ids, logprobs, routes, is_sampled))
            room -= len(token_ids)
        return taken

    def _clear(self) -> None:
        self._parts.clear()
        self._num_tokens = self._route_bytes = 0
        self._text = b""
        self._finish_reason = types_pb2.FINISH_REASON_UNSPECIFIED


def _join(parts: list[npt.NDArray[_Number]], dtype: type[_Number]) -> npt.NDArray[_Number]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _mask(parts: list[_Part]) -> bytes:
    """Empty if all tokens were sampled."""
    if all(part[4] for part in parts):
        return b""
    return b"".join([(b"\1" if part[4] else b"\0") * len(part[1]) for part in parts])


def _version_runs(parts: list[_Part]) -> types_pb2.VersionRuns:
    versions: list[int] = []
    lengths: list[int] = []
    for version, same in groupby(parts, key=itemgetter(0)):
        versions.append(version)
        lengths.append(sum(len(part[1]) for part in same))
    return types_pb2.VersionRuns(versions=np.asarray(versions, "<i8").tobytes(), lengths=int32_bytes(lengths))
