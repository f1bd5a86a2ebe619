"""Encodes a sample for as long as it is kept: one compact element in place of its chunks. Pure.

A sample under way is a list of serialized TokenChunks. Once it is delivered it never grows again, and its chunks are
replaced by a single element: a zero byte, with which no message begins, and a CompactSample. Log-probs of a reference
are an element of their own, beside chunks or compact tokens: a byte of 1, with which no message begins either, and
float32 numbers. `read_sample` reads all of these.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import InternalError
from penstock.v1 import types_pb2
from penstock.wire.codec import int32_bytes, join_versions, merge_versions
from penstock.wire.mask_runs import mask_of, mask_runs
from services.broker.records_pb2 import CompactSample

_MARK, _REFERENCE_MARK = b"\0", b"\1"
_UINT16, _UINT32 = np.dtype("<u2"), np.dtype("<u4")
_VERSION_BYTES = 8
_TEXT_LEVEL = 1
"""Of zlib; higher ones make text 5 % smaller, for half as much time again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """All tokens of a sample, in the wire's form."""

    token_ids: bytes
    logprobs: bytes
    policy_versions: types_pb2.VersionRuns
    """In as few runs as they fit."""
    loss_mask: bytes
    """Empty if all tokens are trained on."""
    text: str
    routes: bytes
    """Rows of all positions but the last; empty in a run without routing."""
    reference_logprobs: bytes = b""
    """Empty in a run without a scorer."""


def read_sample(parts: Sequence[bytes], *, has_text: bool = True) -> StoredSample:
    """A sample as the store has it, in chunks, compact or both; without its text unless that is asked for."""
    tokens = [part for part in parts if part[:1] != _REFERENCE_MARK]
    chunks = [_expanded(part) if part[:1] == _MARK else types_pb2.TokenChunk.FromString(part) for part in tokens]
    token_ids = b"".join([chunk.token_ids for chunk in chunks])
    return StoredSample(
        token_ids=token_ids,
        logprobs=b"".join([chunk.logprobs for chunk in chunks]),
        policy_versions=_joined_versions(chunks, num_tokens=len(token_ids) // 4),
        loss_mask=_joined_masks(chunks),
        text=chunks[-1].text if has_text and chunks else "",
        routes=b"".join([chunk.routes for chunk in chunks]),
        reference_logprobs=next((part[1:] for part in parts if part[:1] == _REFERENCE_MARK), b""),
    )


def reference_element(logprobs: bytes) -> bytes:
    """What is kept of a reference's log-probs, float32[num_tokens]."""
    return _REFERENCE_MARK + logprobs


def compacted(sample: StoredSample) -> bytes:
    """What to keep of a sample that was read with its text."""
    compact = CompactSample(
        num_tokens=len(sample.token_ids) // 4,
        token_ids=_narrow(sample.token_ids),
        logprobs=sample.logprobs,
        policy_versions=sample.policy_versions,
        mask_runs=mask_runs(sample.loss_mask),
        deflated_text=zlib.compress(sample.text.encode(), _TEXT_LEVEL) if sample.text else b"",
        routes=sample.routes,
    )
    return _MARK + compact.SerializeToString()


def _expanded(part: bytes) -> types_pb2.TokenChunk:
    compact = CompactSample.FromString(part[1:])
    return types_pb2.TokenChunk(
        token_ids=_widened(compact.token_ids, compact.num_tokens),
        logprobs=compact.logprobs,
        policy_versions=compact.policy_versions,
        loss_mask=mask_of(compact.mask_runs),
        text=zlib.decompress(compact.deflated_text).decode() if compact.deflated_text else "",
        routes=compact.routes,
    )


def _joined_versions(chunks: Sequence[types_pb2.TokenChunk], *, num_tokens: int) -> types_pb2.VersionRuns:
    versions = b"".join([chunk.policy_versions.versions for chunk in chunks])
    first = versions[:_VERSION_BYTES]
    if versions == first * (len(versions) // _VERSION_BYTES):
        # One version: nearly all samples.
        return types_pb2.VersionRuns(versions=first, lengths=int32_bytes([num_tokens]) if first else b"")
    return merge_versions(join_versions([chunk.policy_versions for chunk in chunks]))


def _narrow(token_ids: bytes) -> bytes:
    """The low 16 bits of each int32, then each higher bit of all of them that any has, eight tokens a byte."""
    if not token_ids:
        return b""
    ids = np.frombuffer(token_ids, _UINT32)
    num_planes = max(0, int(ids.max()).bit_length() - 16)
    planes = [np.packbits((ids >> bit & 1).astype(np.uint8)).tobytes() for bit in range(16, 16 + num_planes)]
    return b"".join([ids.astype(_UINT16).tobytes(), *planes])


def _widened(narrow: bytes, num_tokens: int) -> bytes:
    plane_bytes = (num_tokens + 7) // 8
    high_bytes = len(narrow) - 2 * num_tokens
    if high_bytes < 0 or (high_bytes % plane_bytes if plane_bytes else high_bytes):
        raise InternalError(f"a stored sample of {num_tokens} tokens has {len(narrow)} bytes of token ids")
    ids = np.frombuffer(narrow, _UINT16, count=num_tokens).astype(_UINT32)
    for bit, start in enumerate(range(2 * num_tokens, len(narrow), plane_bytes or 1), 16):
        plane = np.frombuffer(narrow, np.uint8, count=plane_bytes, offset=start)
        ids |= np.unpackbits(plane, count=num_tokens).astype(_UINT32) << bit
    return ids.tobytes()


def _joined_masks(chunks: Sequence[types_pb2.TokenChunk]) -> bytes:
    if not any(chunk.loss_mask for chunk in chunks):
        return b""
    return b"".join([chunk.loss_mask or b"\1" * (len(chunk.token_ids) // 4) for chunk in chunks])
