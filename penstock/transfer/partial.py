"""A content under way: a sparse file of its final size in which every present chunk is verified.

Promises:

- A chunk counts as present only after its digest was checked, and stays in place from then on. Chunks arrive in
  any order.
- The file needs no journal: opening it again hashes what is not a hole, so it never claims a chunk that it lacks.
- Bytes that are there can be read by others while the rest is still on its way, and after the file was renamed or
  deleted, until it is closed.
"""

from __future__ import annotations

import asyncio
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.errors import DigestMismatchError, ServiceUnavailableError
from penstock.process.tasks import set_within
from penstock.transfer.chunks import chunk_digest, chunk_hasher, is_chunk
from penstock.v1 import weights_pb2

STALL_S = 10.0
"""A reader that waits for bytes gives up when nothing at all has arrived for this long."""


class PartialContent:
    """Make one with `open` or `whole`; `close` it when it is no longer read."""

    def __init__(self, descriptor: int, chunks: Sequence[weights_pb2.ChunkInfo], *, good: bytearray) -> None:
        self.size_bytes = chunks[-1].offset + chunks[-1].size_bytes
        self._descriptor = descriptor
        self._chunks = chunks
        self._offsets = [chunk.offset for chunk in chunks]
        self._good = good
        self._num_good = sum(good)
        self._received_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self._keeping = threading.Lock()
        self._error: Exception | None = None
        self._num_users = 1

    @classmethod
    async def open(cls, path: Path, chunks: Sequence[weights_pb2.ChunkInfo]) -> PartialContent:
        """Continue what an earlier attempt left in `path`, or begin. Raises OSError: no space, no permission."""
        descriptor, good = await asyncio.to_thread(_open, path, chunks)
        return cls(descriptor, chunks, good=good)

    @classmethod
    async def whole(cls, path: Path, chunks: Sequence[weights_pb2.ChunkInfo]) -> PartialContent:
        """A complete, verified file."""
        descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
        return cls(descriptor, chunks, good=bytearray(b"\x01" * len(chunks)))

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is present."""
        return self._num_good == len(self._chunks)

    @property
    def missing_bytes(self) -> int:
        """Size of the missing chunks."""
        return sum(self._chunks[index].size_bytes for index in self.missing())

    def chunk(self, index: int) -> weights_pb2.ChunkInfo:
        """The expected chunk of that index."""
        return self._chunks[index]

    def has(self, index: int) -> bool:
        """Whether a chunk is present."""
        return bool(self._good[index])

    def missing(self) -> Iterator[int]:
        """Indices of the missing chunks, in order."""
        return (index for index, is_good in enumerate(self._good) if not is_good)

    async def store(self, index: int, data: bytes | memoryview) -> None:
        """Check and keep a chunk, in a thread. Raises DigestMismatchError, OSError; then none of it is kept."""
        await asyncio.to_thread(_store, self._descriptor, self._chunks[index], data)
        self.keep(index)

    def landing(self, index: int) -> Landing:
        """A chunk that arrives in pieces; `keep` it once it is verified."""
        return Landing(self._descriptor, self._chunks[index])

    def keep(self, index: int) -> None:
        """Mark a chunk as written and verified; in any thread."""
        with self._keeping:
            if not self._good[index]:
                self._good[index] = 1
                self._num_good += 1
        # Each wake-up of the event loop holds up the threads that receive: none without a reader that waits.
        if self._num_waiting:
            self._loop.call_soon_threadsafe(self._wake)

    def note_received(self, num_bytes: int) -> None:
        """Bytes of an incomplete chunk arrived: readers keep waiting for it."""
        self._received_bytes += num_bytes

    def fail(self, error: Exception) -> None:
        """Nothing more will come: wake the waiting readers."""
        self._error = error
        self._wake()

    async def available_until(self, offset: int) -> int:
        """End, in bytes, of the contiguous bytes after `offset`; waits until there is at least one.

        Raises:
            ServiceUnavailableError: Nothing arrived for STALL_S, or nothing more will.
        """
        index = bisect_right(self._offsets, offset) - 1
        # Before the first look: `keep` marks the chunk first and then looks for readers.
        self._num_waiting += 1
        try:
            while not self._good[index]:
                if self._error is not None:
                    raise ServiceUnavailableError(f"it could not be fetched: {self._error}") from self._error
                changed, received_bytes = self._changed, self._received_bytes
                if not await set_within(changed, STALL_S) and self._received_bytes == received_bytes:
                    raise ServiceUnavailableError(f"nothing arrived for {STALL_S:g} s")
        finally:
            self._num_waiting -= 1
        gap = self._good.find(0, index)
        return self.size_bytes if gap < 0 else self._offsets[gap]

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Present bytes; blocks on the disk."""
        return os.pread(self._descriptor, max_bytes, offset)

    def hold(self) -> PartialContent:
        """Add a user, which must close it too."""
        self._num_users += 1
        return self

    def close(self) -> None:
        """Remove a user; the file is closed after the last one."""
        self._num_users -= 1
        if self._num_users == 0:
            os.close(self._descriptor)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Landing:
    """A chunk on its way into the file, for one thread at a time.

    Each piece is hashed and written when it comes, while the processor's cache still holds it.
    """

    def __init__(self, descriptor: int, chunk: weights_pb2.ChunkInfo) -> None:
        self._descriptor = descriptor
        self._chunk = chunk
        self._hasher = chunk_hasher(chunk)
        self._landed_bytes = 0

    @property
    def begin(self) -> int:
        """Offset of the next piece in the content, in bytes."""
        return self._chunk.offset + self._landed_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes still missing."""
        return self._chunk.size_bytes - self._landed_bytes

    def add(self, piece: bytes | memoryview) -> None:
        """Take the next bytes, at most `missing_bytes`. Raises OSError: no space."""
        self._hasher.update(piece)
        _write(self._descriptor, piece, self.begin)
        self._landed_bytes += len(piece)

    def check(self) -> None:
        """Return if the received bytes are the chunk. Raises DigestMismatchError, and starts over."""
        if self._hasher.hexdigest() != chunk_digest(self._chunk):
            self._hasher, self._landed_bytes = chunk_hasher(self._chunk), 0
            raise _mismatch(self._chunk)


def _store(descriptor: int, chunk: weights_pb2.ChunkInfo, data: bytes | memoryview) -> None:
    if not is_chunk(chunk, data):
        raise _mismatch(chunk)
    _write(descriptor, data, chunk.offset)


def _mismatch(chunk: weights_pb2.ChunkInfo) -> DigestMismatchError:
    return DigestMismatchError(f"the chunk at byte {chunk.offset} has another digest")


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def _open(path: Path, chunks: Sequence[weights_pb2.ChunkInfo]) -> tuple[int, bytearray]:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(descriptor, chunks[-1].offset + chunks[-1].size_bytes)
        return descriptor, bytearray(_is_good(descriptor, chunk) for chunk in chunks)
    except BaseException:
        os.close(descriptor)
        raise


def _is_good(descriptor: int, chunk: weights_pb2.ChunkInfo) -> bool:
    try:
        data_offset = os.lseek(descriptor, chunk.offset, os.SEEK_DATA)
    except OSError:
        # Nothing but a hole up to the end of the file.
        return False
    if data_offset >= chunk.offset + chunk.size_bytes:
        return False
    return is_chunk(chunk, os.pread(descriptor, chunk.size_bytes, chunk.offset))
