"""Splits a content into chunks, which are checked one by one in transit.

They are hashed with BLAKE3; manifests that name SHA-256 are understood.

Promises:

- The size of a chunk follows from that of the content: there are never more than a manifest can list in one message.
- It is a power of two, so that a larger chunk ends where smaller ones do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from penstock.model.hashing import Hasher, new_hasher
from penstock.v1 import weights_pb2

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1024**2, 64 * 1024**2
MANY_CHUNKS = 4096
"""With more than that the chunks grow, up to the largest size: a list for 2 TB takes 2.4 MB of a manifest."""


def chunk_bytes_for(size_bytes: int) -> int:
    """The size of a chunk, in bytes: 1 MiB for a content of up to 4 GiB, doubling with it to 64 MiB."""
    chunk_bytes = MIN_CHUNK_BYTES
    while chunk_bytes < MAX_CHUNK_BYTES and size_bytes > chunk_bytes * MANY_CHUNKS:
        chunk_bytes *= 2
    return chunk_bytes


def chunk_digest(chunk: weights_pb2.ChunkInfo) -> str:
    """The digest that a chunk must have, hex, by either algorithm; empty if it states none."""
    return chunk.blake3 or chunk.sha256


def chunk_hasher(chunk: weights_pb2.ChunkInfo) -> Hasher:
    """A hasher of the algorithm that a chunk's digest names."""
    return new_hasher("blake3" if chunk.blake3 else "sha256")


def is_chunk(chunk: weights_pb2.ChunkInfo, data: bytes | memoryview) -> bool:
    """Whether bytes have the digest that a chunk must have."""
    digest = chunk_hasher(chunk)
    digest.update(data)
    return digest.hexdigest() == chunk_digest(chunk)


def chunks_of(path: Path, *, chunk_bytes: int | None = None) -> list[weights_pb2.ChunkInfo]:
    """The consecutive chunks of a file; the last may be shorter, an empty file has none.

    Args:
        path: The file.
        chunk_bytes: Size of a chunk, > 0; where None it follows from the file's.

    Raises:
        OSError: The file cannot be read.
    """
    return list(chunks_at(path, chunk_spans(path.stat().st_size, chunk_bytes)))


def chunk_spans(size_bytes: int, chunk_bytes: int | None = None) -> list[tuple[int, int]]:
    """Where the chunks of a content begin, and their sizes; see `chunks_of`."""
    size = chunk_bytes or chunk_bytes_for(size_bytes)
    return [(offset, min(size, size_bytes - offset)) for offset in range(0, size_bytes, size)]


def chunks_at(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[weights_pb2.ChunkInfo]:
    """The chunks of a file at those places; raises OSError if it cannot be read, or ends before."""
    with path.open("rb") as file:
        for offset, size_bytes in spans:
            file.seek(offset)
            piece = file.read(size_bytes)
            if len(piece) < size_bytes:
                raise OSError(f"{path}: shorter than it was")
            yield weights_pb2.ChunkInfo(offset=offset, size_bytes=size_bytes, blake3=blake3(piece).hexdigest())
