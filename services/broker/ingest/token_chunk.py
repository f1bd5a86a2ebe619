"""Checks token chunks once on arrival. Pure.

All checks that need no run state are here; `append_tokens` does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from penstock.errors import InvalidFieldError, require
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.routes import RouteFacts, read_facts
from services.broker.ingest.score_check import check_score
from services.broker.ingest.token_arrays import check_tokens, version_ranges

MAX_TEXT_BYTES = 8 * 1024 * 1024
"""Bound such that a sample with token ids and prompt fits one message to a reward worker."""
_FINISH_REASONS = frozenset(types_pb2.FinishReason.values())
_SCORED_ENDS = frozenset((types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH))
_Look = tuple[int, int | None, int | None]
"""Number of a chunk's tokens, their oldest and newest version; None if there are none, or they are malformed."""
_KEY = attrgetter("group_id", "sample_index", "attempt")
_PLACE = attrgetter("lease_id", "offset", "finish_reason")


class ChunkFacts(NamedTuple):
    """The checked properties of a chunk, and the bytes to keep; a tuple, as nothing else is made as fast."""

    group_id: str
    sample_index: int
    attempt: int
    lease_id: str
    offset: int
    finish_reason: types_pb2.FinishReason.ValueType
    num_tokens: int
    min_version: int | None
    max_version: int | None
    fault: str
    """Why the chunk is malformed; empty if it is valid."""
    payload: bytes
    """The TokenChunk without key and lease."""
    score: types_pb2.Score | None
    """Its environment's, in a chunk that ends its sample."""
    routes: RouteFacts
    """Checked by `ChunkRules`, since their form is the run's."""

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

    One check of all together decides the usual case, in which all are valid: a chunk often has two tokens, and checking
    each alone would cost more than all its other processing.
    """
    chunks = list(chunks)
    try:
        return _facts(chunks, _look(chunks))
    except InvalidFieldError:
        return [read_chunk(chunk) for chunk in chunks]


def read_chunk(chunk: types_pb2.TokenChunk) -> ChunkFacts:
    """Check one chunk by itself; see `read_chunks`."""
    look: _Look = (len(chunk.token_ids) // 4, None, None)
    fault = ""
    try:
        [look] = _look([chunk])
    except InvalidFieldError as error:
        fault = str(error)
    [facts] = _facts([chunk], [look], fault)
    return facts


def _look(chunks: Sequence[types_pb2.TokenChunk]) -> list[_Look]:
    """The token statistics of each chunk. Raises InvalidFieldError with the first fault found in any."""
    if not chunks:
        return []
    num_tokens = check_tokens(
        [chunk.token_ids for chunk in chunks],
        [chunk.logprobs for chunk in chunks],
        [chunk.loss_mask for chunk in chunks],
        logprobs_field="logprobs",
    )
    for chunk, count in zip(chunks, num_tokens, strict=True):
        if not count or chunk.finish_reason or chunk.text or chunk.HasField("score"):
            _check_end(chunk)
    ranges = zip(*version_ranges([chunk.policy_versions for chunk in chunks], num_tokens), strict=True)
    return [(count, *next(ranges)) if count else (0, None, None) for count in num_tokens]


def _check_end(chunk: types_pb2.TokenChunk) -> None:
    """Check what a chunk that ends its sample may have: a reason, text, a score, or no token."""
    reason, text = chunk.finish_reason, chunk.text
    require(reason in _FINISH_REASONS, "finish_reason", reason, "a known FinishReason")
    is_good = not text or (reason > 0 and not _is_longer(text, MAX_TEXT_BYTES))
    require(is_good, "text", f"{len(text)} characters", f"in the last chunk only, at most {MAX_TEXT_BYTES} bytes")
    if chunk.HasField("score"):
        require(reason in _SCORED_ENDS, "score", "set", "unset unless the reason is STOP or LENGTH")
        check_score(chunk.score)
    require(bool(reason or chunk.token_ids), "token_ids", "empty", "set in a chunk that does not end the sample")


def _facts(chunks: Sequence[types_pb2.TokenChunk], looks: Sequence[_Look], fault: str = "") -> list[ChunkFacts]:
    # Column by column: most of it then runs in C.
    places = list(map(_PLACE, chunks))
    keys = [_KEY(chunk.key) for chunk in chunks]
    scores = [_taken_score(chunk) if place[2] else None for chunk, place in zip(chunks, places, strict=True)]
    routes = [read_facts(chunk.routes) for chunk in chunks]
    payloads = map(_payload, chunks)
    return [
        ChunkFacts._make((*key, *place, *look, fault, *kept))
        for key, place, look, *kept in zip(keys, places, looks, payloads, scores, routes, strict=True)
    ]


def _taken_score(chunk: types_pb2.TokenChunk) -> types_pb2.Score | None:
    """A score is kept with its sample's record, not with its tokens."""
    if not chunk.HasField("score"):
        return None
    score = types_pb2.Score()
    score.CopyFrom(chunk.score)
    chunk.ClearField("score")
    return score


def _payload(chunk: types_pb2.TokenChunk) -> bytes:
    chunk.ClearField("key")
    chunk.ClearField("lease_id")
    return chunk.SerializeToString()


def _is_longer(text: str, num_bytes: int) -> bool:
    """Whether text takes more than this many bytes as UTF-8, which has at most 4 per character."""
    return 4 * len(text) > num_bytes and len(text.encode()) > num_bytes
