"""Compresses contents in transit, for links slower than a processor: the bytes of a range as frames.

    stored bytes u32, little-endian | one zstd frame that states its content size, at most MAX_PLAIN_BYTES

A receiver asks with the header `Penstock-Coding: zstd`, and a coded answer carries the same header. Offsets and
digests are always of the plain bytes, as is what is stored. `docs/weights.md` has what it saves.
"""

from __future__ import annotations

from io import BufferedIOBase

import zstandard

from penstock.errors import ServiceUnavailableError

CODING_HEADER, ZSTD = "Penstock-Coding", "zstd"
MAX_PLAIN_BYTES = 1024**2
MAX_STORED_BYTES = MAX_PLAIN_BYTES + 64 * 1024
"""An upper bound on zstd's output for incompressible input."""
LEVEL = 1
_LENGTH_BYTES = 4


def encode_frame(plain: bytes) -> bytes:
    """One frame, with its length; `plain` has 1 to MAX_PLAIN_BYTES bytes."""
    stored = zstandard.ZstdCompressor(level=LEVEL).compress(plain)
    return len(stored).to_bytes(_LENGTH_BYTES, "little") + stored


def decode_frame(stored: bytes) -> bytes:
    """The plain bytes of a frame without its length, never more than MAX_PLAIN_BYTES.

    Raises:
        ServiceUnavailableError: The frame is malformed; another source may send a valid one.
    """
    try:
        num_bytes = zstandard.frame_content_size(stored)
        if not 1 <= num_bytes <= MAX_PLAIN_BYTES:
            raise ServiceUnavailableError(f"a frame states {num_bytes} bytes, expected 1 to {MAX_PLAIN_BYTES}")
        plain = zstandard.ZstdDecompressor().decompress(stored, max_output_size=num_bytes)
    except zstandard.ZstdError as error:
        raise ServiceUnavailableError(f"a frame does not unpack: {error}") from error
    if len(plain) != num_bytes:
        raise ServiceUnavailableError(f"a frame holds {len(plain)} bytes and states {num_bytes}")
    return plain


def read_frame(body: BufferedIOBase) -> tuple[bytes, int]:
    """The plain bytes of the next frame, and the number of bytes received for them.

    Raises:
        ServiceUnavailableError: The body ended, or does not consist of frames.
    """
    length = int.from_bytes(_read_exactly(body, _LENGTH_BYTES), "little")
    if not 1 <= length <= MAX_STORED_BYTES:
        raise ServiceUnavailableError(f"a frame of {length} bytes, expected 1 to {MAX_STORED_BYTES}")
    return decode_frame(_read_exactly(body, length)), _LENGTH_BYTES + length


def _read_exactly(body: BufferedIOBase, num_bytes: int) -> bytes:
    data = body.read(num_bytes)
    if len(data) < num_bytes:
        raise ServiceUnavailableError("the source broke off")
    return data
