"""The changes in one block of a tensor: which elements changed, and which bits of them.

A change is the exclusive or of an element's old and new bits. It has three merits over the new value: it is exact for
NaN payloads and signed zeros, it is mostly zero bits (and so compresses) where training moved a value only slightly,
and on the wrong base it yields values that a digest exposes.

    GAPS    positions: for each changed element the number of unchanged ones before it, one byte; 255 means "255
            unchanged ones, none changed after them"
    BITMAP  positions: one bit for each element, lowest bit first
    EVERY   no positions: a change, perhaps zero, for each element

Changes are laid out in byte planes: the lowest bytes of all of them, then the next ones, up to the highest. Positions
and changes are packed with zstd each where that makes them smaller. Pure, and vectorised: no loop over elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import zstandard

from penstock.model.digests import MalformedWeightsError

Elements = npt.NDArray[np.unsignedinteger]
"""Raw bits of elements, [n], little-endian unsigned of the element's width."""

ZSTD_LEVEL = 1
"""Level 3 gained nothing on changes of bf16 and fp32, and took up to 3 times as long; -1 left a tenth to 4 tenths."""

_SKIP = 255
_BITS = 8


class MalformedDeltaError(MalformedWeightsError):
    """The content of a delta violates its format."""


class Coding(IntEnum):
    """How the positions of changed elements are given."""

    GAPS = 1
    BITMAP = 2
    EVERY = 3


class Packing(IntEnum):
    """How a run of bytes is stored."""

    PLAIN = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True)
class Packed:
    """A run of bytes as it is stored."""

    packing: Packing
    num_plain_bytes: int
    """Number of bytes that it decodes to."""
    stored: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes in one block."""

    coding: Coding
    positions: Packed
    values: Packed


def changes_between(old: Elements, new: Elements) -> Changes | None:
    """The changes from `old` to `new`, both [n] of the same width; None if nothing changed."""
    difference = np.bitwise_xor(old, new)
    where = np.flatnonzero(difference != 0)
    if where.size == 0:
        return None
    coding, positions = _positions(where, num_elements=old.size)
    if positions.size + where.size * old.itemsize >= old.nbytes:
        coding, positions, values = Coding.EVERY, positions[:0], difference
    else:
        values = difference[where]
    return Changes(coding, _pack(positions), _pack(_planes(values)))


def apply_changes(changes: Changes, elements: Elements) -> None:
    """Turn the old `elements` into the new ones in place.

    Raises:
        MalformedDeltaError: The changes do not fit this number of elements of that width.
    """
    values = _from_planes(_unpack(changes.values, max_bytes=elements.nbytes), elements.dtype)
    if changes.coding is Coding.EVERY:
        _require(values.size == elements.size and changes.positions.num_plain_bytes == 0, "a change for each element")
        np.bitwise_xor(elements, values, out=elements)
        return
    # A byte of gaps stands for at least one element, a byte of the bitmap for eight.
    positions = _unpack(changes.positions, max_bytes=elements.size)
    where = _from_gaps(positions) if changes.coding is Coding.GAPS else _from_bitmap(positions, elements.size)
    _require(where.size == values.size, "as many changes as positions")
    _require(where.size == 0 or int(where[-1]) < elements.size, "positions inside the block")
    elements[where] ^= values


def _positions(where: npt.NDArray[np.intp], *, num_elements: int) -> tuple[Coding, npt.NDArray[np.uint8]]:
    """The smaller way to say `where`, which is ascending and not empty."""
    gaps = np.diff(where, prepend=-1) - 1
    num_bitmap_bytes = -(-num_elements // _BITS)
    if where.size < num_bitmap_bytes:
        words = _gap_words(gaps)
        if words.size < num_bitmap_bytes:
            return Coding.GAPS, words
    mask = np.zeros(num_elements, np.bool_)
    mask[where] = True
    return Coding.BITMAP, np.packbits(mask, bitorder="little")


def _gap_words(gaps: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
    if int(gaps.max()) < _SKIP:
        return gaps.astype(np.uint8)
    num_skips, rest = np.divmod(gaps, _SKIP)
    ends = np.cumsum(num_skips + 1)
    words = np.full(int(ends[-1]), _SKIP, np.uint8)
    words[ends - 1] = rest
    return words


def _from_gaps(words: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    is_changed = words != _SKIP
    ends = np.cumsum(words.astype(np.intp) + is_changed)
    where: npt.NDArray[np.intp] = ends[is_changed] - 1
    return where


def _from_bitmap(bitmap: npt.NDArray[np.uint8], num_elements: int) -> npt.NDArray[np.intp]:
    _require(bitmap.size == -(-num_elements // _BITS), "a bit for each element")
    return np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))


def _planes(values: Elements) -> npt.NDArray[np.uint8]:
    if values.itemsize == 1:
        return values.view(np.uint8)
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).reshape(-1)


def _from_planes(planes: npt.NDArray[np.uint8], dtype: np.dtype[np.unsignedinteger]) -> Elements:
    _require(planes.size % dtype.itemsize == 0, "whole elements")
    if dtype.itemsize == 1:
        return planes.view(dtype)
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)


def _pack(plain: npt.NDArray[np.uint8]) -> Packed:
    squeezed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(plain.data) if plain.size else b""
    if plain.size and len(squeezed) < plain.size:
        return Packed(Packing.ZSTD, plain.size, squeezed)
    return Packed(Packing.PLAIN, plain.size, plain.tobytes())


def _unpack(packed: Packed, *, max_bytes: int) -> npt.NDArray[np.uint8]:
    num_bytes = packed.num_plain_bytes
    _require(num_bytes <= max_bytes, "no more bytes than the block needs")
    if packed.packing is Packing.PLAIN:
        plain = packed.stored
    else:
        try:
            # The frame's own statement of its size decides how much is allocated, so check it first.
            _require(zstandard.frame_content_size(packed.stored) == num_bytes, "a zstd frame of the stated size")
            plain = zstandard.ZstdDecompressor().decompress(packed.stored, max_output_size=num_bytes)
        except zstandard.ZstdError as error:
            raise MalformedDeltaError(f"a delta's block does not unpack: {error}") from error
    _require(len(plain) == num_bytes, "as many bytes as stated")
    return np.frombuffer(plain, np.uint8)


def _require(is_so: bool, expected: str) -> None:
    if not is_so:
        raise MalformedDeltaError(f"a delta's block is malformed: expected {expected}")
