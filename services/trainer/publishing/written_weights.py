"""A version's file as it was written, before it is described to receivers."""

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
