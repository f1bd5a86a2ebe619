"""Makes and applies the content of a delta: a file of the blocks that changed between two versions.

    "PSDELTA1" | digest of the base, 32 bytes | digest of the result, 32 bytes
    for each changed block:
        header, 27 bytes, see _BLOCK | positions as stored | values as stored
    SHA-256 of everything before, 32 bytes

Numbers are little-endian. Tensors are numbered by name order, and cut into blocks of BLOCK_BYTES (the last of a tensor
may be shorter); changed blocks come in that order, and unchanged blocks take no space. Promises:

- A delta for another base, or with a byte changed or missing, is refused before anything is written.
- The result appears under its name by a rename, with every tensor checked against its digest, or not at all. The base
  is only read.
- Memory: one block and its coding at a time; the files themselves are mapped.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.deltas.blocks import (
    Changes,
    Coding,
    Elements,
    MalformedDeltaError,
    Packed,
    Packing,
    apply_changes,
    changes_between,
)
from penstock.model.digests import (
    TensorPlace,
    WeightsMismatchError,
    algorithm_of,
    check_tensors,
    safetensors_places,
    tensor_info,
)
from penstock.model.hashing import Algorithm, new_hasher
from penstock.v1.weights_pb2 import TensorInfo

BLOCK_BYTES = 4 * 1024 * 1024
"""Of a tensor; a multiple of every element's width."""

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of a file that is being written; a killed process leaves it behind."""

_MAGIC = b"PSDELTA1"
_DIGEST_BYTES = 32
_HEADER_BYTES = len(_MAGIC) + 2 * _DIGEST_BYTES
# Tensor, block, coding; then for positions and for values: packing, plain bytes, stored bytes.
_BLOCK = struct.Struct("<IIBBIIBII")
_Bytes = npt.NDArray[np.uint8]


def write_delta(
    base: Path,
    new: Path,
    target: Path,
    *,
    base_digest: str,
    digest: str,
    max_bytes: int,
    is_wanted: Callable[[], bool] = lambda: True,
) -> int | None:
    """Write the delta from one safetensors file to another; returns its size in bytes.

    Args:
        base: The older version.
        new: The newer version.
        target: The delta; complete under its name or not there.
        base_digest: The older version's manifest digest, hex.
        digest: The newer version's manifest digest, hex.
        max_bytes: Give up as soon as the delta would be larger.
        is_wanted: Asked before every block that changed; give up once it says no.

    Returns:
        None where there is no delta worth having: it is larger than `max_bytes`, or the versions do not have the same
        tensors by name, type and shape; or it is not wanted any more. `target` is not there then.

    Raises:
        MalformedWeightsError: A file is not safetensors.
        OSError: A file cannot be read or written.
    """
    old_places, new_places = safetensors_places(base), safetensors_places(new)
    if [_kind(place) for place in old_places] != [_kind(place) for place in new_places]:
        return None
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    whole = hashlib.sha256()
    size_bytes = 0
    try:
        with temporary.open("wb") as file:
            for piece in _pieces(base, new, old_places, new_places, bytes.fromhex(base_digest + digest)):
                size_bytes += len(piece)
                if size_bytes + _DIGEST_BYTES > max_bytes or not is_wanted():
                    return None
                whole.update(piece)
                file.write(piece)
            file.write(whole.digest())
        temporary.replace(target)
        return size_bytes + _DIGEST_BYTES
    finally:
        temporary.unlink(missing_ok=True)


def apply_deltas(
    base: Path,
    deltas: Sequence[Path],
    target: Path,
    *,
    base_digest: str,
    tensors: Sequence[TensorInfo],
    digest: str,
) -> None:
    """Write the version that a chain of deltas makes of `base`.

    Args:
        base: A safetensors file.
        deltas: At least one, in the order in which they apply.
        target: The result, laid out as `base` is; not there after an error.
        base_digest: Manifest digest of what `base` holds, hex.
        tensors: The tensors of the result.
        digest: Its manifest digest, hex.

    Raises:
        WeightsMismatchError: A delta applies to another version than the one before it, or the result is not what
            was stated.
        MalformedDeltaError: A delta was changed, cut, or is no delta.
        MalformedWeightsError: The base is not safetensors.
        OSError: A file cannot be read or written.
    """
    contents = [_checked(path) for path in deltas]
    chain = [base_digest, *(hex_digest for content in contents for hex_digest in _ends(content)), digest]
    if any(before != after for before, after in zip(chain[::2], chain[1::2], strict=True)):
        raise WeightsMismatchError(f"deltas lead {' '.join(end[:16] for end in chain)}: the ends do not meet")
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    readers = [_BlockReader(content) for content in contents]
    try:
        found = _write_result(base, readers, temporary, algorithm_of(tensors))
        check_tensors(found, tensors=tensors, digest=digest, holder=f"{base.name} with its deltas")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _write_result(base: Path, readers: Sequence[_BlockReader], target: Path, algorithm: Algorithm) -> list[TensorInfo]:
    """Write the base with all changes, block by block; returns what was written."""
    places = safetensors_places(base)
    old = np.memmap(base, np.uint8, mode="r")
    found = []
    with target.open("wb") as file:
        file.write(old[: min((place.begin for place in places), default=old.size)].data)
        for number, place in enumerate(places):
            hasher = new_hasher(algorithm)
            file.seek(place.begin)
            for block in range(_num_blocks(place)):
                elements = _block(old, place, block).copy()
                for reader in readers:
                    reader.apply(number, block, elements)
                hasher.update(elements.view(np.uint8).data)
                file.write(elements.data)
            found.append(
                tensor_info(
                    name=place.name,
                    dtype=place.dtype,
                    shape=place.shape,
                    digest=hasher.hexdigest(),
                    algorithm=algorithm,
                )
            )
    for reader in readers:
        reader.require_end()
    return found


def _kind(place: TensorPlace) -> tuple[str, str, tuple[int, ...]]:
    return place.name, place.dtype, place.shape


def _pieces(
    base: Path, new: Path, old_places: Sequence[TensorPlace], new_places: Sequence[TensorPlace], digests: bytes
) -> Iterator[bytes | memoryview]:
    yield _MAGIC + digests
    old_bytes, new_bytes = np.memmap(base, np.uint8, mode="r"), np.memmap(new, np.uint8, mode="r")
    for number, place in enumerate(old_places):
        for block in range(_num_blocks(place)):
            changes = changes_between(_block(old_bytes, place, block), _block(new_bytes, new_places[number], block))
            if changes is not None:
                parts = (changes.positions, changes.values)
                lengths = [item for part in parts for item in (part.packing, part.num_plain_bytes, len(part.stored))]
                yield _BLOCK.pack(number, block, changes.coding, *lengths)
                yield from (part.stored for part in parts)


def _num_blocks(place: TensorPlace) -> int:
    return -(-(place.end - place.begin) // BLOCK_BYTES)


def _block(data: _Bytes, place: TensorPlace, block: int) -> Elements:
    begin = place.begin + block * BLOCK_BYTES
    return data[begin : min(begin + BLOCK_BYTES, place.end)].view(f"<u{place.element_bytes}")


def _checked(path: Path) -> memoryview:
    """The content without its own digest, once that is verified."""
    if path.stat().st_size < _HEADER_BYTES + _DIGEST_BYTES:
        raise MalformedDeltaError(f"{path.name}: too short for a delta")
    content = np.memmap(path, np.uint8, mode="r").data
    if content[: len(_MAGIC)] != _MAGIC:
        raise MalformedDeltaError(f"{path.name}: not a delta")
    body = content[:-_DIGEST_BYTES]
    if hashlib.sha256(body).digest() != content[-_DIGEST_BYTES:]:
        raise MalformedDeltaError(f"{path.name}: its bytes do not have the digest at its end")
    return body


def _ends(content: memoryview) -> tuple[str, str]:
    """Digests of a delta's base and of its result, hex."""
    cuts = (len(_MAGIC), len(_MAGIC) + _DIGEST_BYTES, _HEADER_BYTES)
    first, second = (content[begin:end].hex() for begin, end in pairwise(cuts))
    return first, second


class _BlockReader:
    """The blocks of a delta, which come in the order of tensors and of blocks in them."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._offset = _HEADER_BYTES
        self._next = self._read()

    def apply(self, number: int, block: int, elements: Elements) -> None:
        """Change a block in place if it is among those that changed; to be asked for every block there is."""
        if self._next is not None and self._next[:2] == (number, block):
            apply_changes(self._next[2], elements)
            self._next = self._read()

    def require_end(self) -> None:
        """Raises MalformedDeltaError if changes are left over."""
        if self._next is not None:
            number, block, _ = self._next
            raise MalformedDeltaError(
                f"a delta has block {block} of tensor {number} out of order, or where there is none"
            )

    def _read(self) -> tuple[int, int, Changes] | None:
        """Tensor number, block number and changes."""
        offset = self._offset
        if offset == len(self._content):
            return None
        if offset + _BLOCK.size > len(self._content):
            raise MalformedDeltaError("a delta ends inside a block's header")
        number, block, coding, *lengths = _BLOCK.unpack_from(self._content, offset)
        positions, offset = _read_packed(self._content, offset + _BLOCK.size, *lengths[:3])
        values, self._offset = _read_packed(self._content, offset, *lengths[3:])
        if coding not in set(Coding):
            raise MalformedDeltaError(f"a delta's block has unknown coding {coding}")
        return number, block, Changes(Coding(coding), positions, values)


def _read_packed(
    content: memoryview, offset: int, packing: int, num_plain_bytes: int, num_stored_bytes: int
) -> tuple[Packed, int]:
    """The bytes that are stored at `offset`, and where they end."""
    end = offset + num_stored_bytes
    if packing not in set(Packing) or end > len(content):
        raise MalformedDeltaError(f"a delta's block has unknown packing {packing} or ends beyond the content")
    return Packed(Packing(packing), num_plain_bytes, content[offset:end]), end
