"""A version's file as it was written, before it is described to receivers, and what that took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.v1 import weights_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWeights:
    """A complete safetensors file and the digests of what is in it."""

    path: Path
    tensors: tuple[weights_pb2.TensorInfo, ...]
    """Sorted by name."""
    chunks: tuple[weights_pb2.ChunkInfo, ...]
    """In order."""
    write_s: float = 0.0
    """How long all processes together took to write it, seconds."""
    digest_s: float = 0.0
    """How long they then took to digest it, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTimes:
    """What offering a version took."""

    offer_s: float
    """From the end of its optimiser step until it was offered, seconds."""
    write_s: float
    """Writing its file, seconds."""
    digest_s: float
    """Digesting it, seconds."""
    num_bytes: int
    """Of the file."""
