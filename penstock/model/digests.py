"""The identity of a set of weights: digests of tensors and of a whole version.

Shared by publishers and receivers of weights; needs nothing heavy. Promises:

- A version's digest depends on what its tensors are (name, element type, shape, bytes), never on the order they were
  written in, on the file's metadata, or on how the file was split for transfer.
- A safetensors header is untrusted input: its size, names, types, shapes and offsets are checked before any is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from penstock.errors import DigestMismatchError
from penstock.model.hashing import Algorithm, new_hasher
from penstock.v1.weights_pb2 import TensorInfo

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit on its header."""
MAX_NAME_CHARACTERS = 1024
MAX_NAMED_MISMATCHES = 5

_HEADER_LENGTH_BYTES = 8
_MAPPED_BYTES = 64 << 20
"""Of a file, those that are in memory at a time while it is digested."""
_UNUSABLE = re.compile("[\\x00-\\x1f\\ud800-\\udfff]")
"""Control characters, and halves of characters, which no message carries."""
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class WeightsMismatchError(DigestMismatchError):
    """Weights are not what their manifest states; `metadata["tensors"]` names the first ones that differ."""


class MalformedWeightsError(ValueError):
    """A weights file cannot be read as safetensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a safetensors file keeps one tensor; offsets count from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def element_bytes(self) -> int:
        """Width of an element."""
        return _DTYPE_BYTES[self.dtype]


def tensor_digest(
    *, name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview, algorithm: Algorithm = "blake3"
) -> TensorInfo:
    """The digest of one tensor.

    Args:
        name: Name in the Hugging Face state dict.
        dtype: Element type as safetensors spells it.
        shape: Shape; empty for a scalar.
        data: The little-endian row-major bytes, contiguous.
        algorithm: Of the digest.

    Raises:
        ValueError: The type is unknown, or the bytes are not as many as type and shape ask for.
    """
    expected = _tensor_bytes(dtype, shape)
    view = memoryview(data).cast("B")
    if view.nbytes != expected:
        raise ValueError(f"{name}: {view.nbytes} bytes for {dtype} {tuple(shape)}, expected {expected}")
    hasher = new_hasher(algorithm)
    hasher.update(view)
    return tensor_info(name=name, dtype=dtype, shape=shape, digest=hasher.hexdigest(), algorithm=algorithm)


def tensor_info(*, name: str, dtype: str, shape: Sequence[int], digest: str, algorithm: Algorithm) -> TensorInfo:
    """A tensor whose digest is known."""
    digests = {algorithm: digest}
    return TensorInfo(name=name, dtype=dtype, shape=shape, size_bytes=_tensor_bytes(dtype, shape), **digests)


def algorithm_of(tensors: Sequence[TensorInfo]) -> Algorithm:
    """The algorithm of their digests: of all the same one, or they equal nothing that is found."""
    return "sha256" if tensors and tensors[0].sha256 else "blake3"


def manifest_digest(tensors: Iterable[TensorInfo]) -> str:
    """SHA-256, hex, over one line for each tensor in name order: name, dtype, shape and digest, tab-separated.

    Example: a line is `model.norm.weight<TAB>F32<TAB>64<TAB>9f86d0...<LF>`; a shape of two is written `8x64`.

    Raises:
        ValueError: Two tensors share a name.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    digest = hashlib.sha256()
    previous: str | None = None
    for tensor in ordered:
        if tensor.name == previous:
            raise ValueError(f"two tensors are named {tensor.name}")
        previous = tensor.name
        shape = "x".join(str(size) for size in tensor.shape)
        digest.update(f"{tensor.name}\t{tensor.dtype}\t{shape}\t{tensor.blake3 or tensor.sha256}\n".encode())
    return digest.hexdigest()


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, by name; reads its header only.

    Raises:
        MalformedWeightsError: The file is not safetensors, or its header does not fit its length.
        OSError: The file cannot be read.
    """
    return {place.name: place.shape for place in safetensors_places(path)}


def safetensors_places(path: Path) -> tuple[TensorPlace, ...]:
    """Where a safetensors file keeps its tensors, sorted by name; reads its header only.

    Raises:
        MalformedWeightsError: The file is not safetensors, or its header does not fit its length.
        OSError: The file cannot be read.
    """
    with _mapped(path) as mapped, memoryview(mapped) as view:
        return _read_places(path.name, view)


def safetensors_digests(path: Path, algorithm: Algorithm = "blake3") -> tuple[TensorInfo, ...]:
    """The digests of the tensors in a safetensors file, sorted by name.

    Raises:
        MalformedWeightsError: The file is not safetensors, or its header does not fit its length.
        OSError: The file cannot be read.
    """
    return digests_at(path, safetensors_places(path), algorithm)


def digests_at(path: Path, places: Iterable[TensorPlace], algorithm: Algorithm = "blake3") -> tuple[TensorInfo, ...]:
    """The digests of some tensors of a safetensors file, in the order of their places; raises OSError."""
    with _mapped(path) as mapped:
        return tuple(_digest_at(mapped, place, algorithm) for place in places)


def verify_safetensors(path: Path, *, tensors: Sequence[TensorInfo], digest: str) -> None:
    """Returns if the file holds exactly `tensors` and their manifest digest is `digest`.

    Raises:
        WeightsMismatchError: Anything differs; the message names the first tensors that do.
        MalformedWeightsError: The file is not safetensors.
        OSError: The file cannot be read.
    """
    check_tensors(safetensors_digests(path, algorithm_of(tensors)), tensors=tensors, digest=digest, holder=path.name)


def check_tensors(found: Iterable[TensorInfo], *, tensors: Sequence[TensorInfo], digest: str, holder: str) -> None:
    """Returns if what `holder` was found to have is exactly `tensors`, whose manifest digest is `digest`.

    Raises:
        WeightsMismatchError: Anything differs; the message names the first tensors that do.
    """
    stated = manifest_digest(tensors)
    if stated != digest:
        raise WeightsMismatchError(f"the listed tensors have digest {stated}, the manifest states {digest}")
    held = {tensor.name: tensor for tensor in found}
    expected = {tensor.name: tensor for tensor in tensors}
    names = held.keys() | expected.keys()
    mismatches = sorted(name for name in names if held.get(name) != expected.get(name))
    if mismatches:
        raise mismatch_error(f"{holder} does not hold what the manifest lists", mismatches)


def check_layout(
    held: Mapping[str, tuple[int, ...]], tensors: Iterable[TensorInfo], *, optional: Collection[str] = ()
) -> None:
    """Raises WeightsMismatchError unless the tensors have exactly the names and shapes a model holds.

    Args:
        held: Shapes by name.
        tensors: Those on offer.
        optional: Names that may be on either side alone, such as an output head tied to the embedding.
    """
    offered = {tensor.name: tuple(tensor.shape) for tensor in tensors}
    names = (offered.keys() | held.keys()) - {name for name in optional if not (name in offered and name in held)}
    mismatches = sorted(name for name in names if offered.get(name) != held.get(name))
    if mismatches:
        raise mismatch_error("not the tensors this model holds, by name or shape", mismatches)


def mismatch_error(what: str, names: Sequence[str]) -> WeightsMismatchError:
    """A WeightsMismatchError saying `what` and naming the first few of the tensors concerned."""
    listed = ", ".join(names[:MAX_NAMED_MISMATCHES])
    more = f" and {len(names) - MAX_NAMED_MISMATCHES} more" if len(names) > MAX_NAMED_MISMATCHES else ""
    return WeightsMismatchError(f"{what}: {listed}{more}", tensors=listed)


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    if path.stat().st_size == 0:
        raise MalformedWeightsError(f"{path.name}: empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        yield mapped


def _digest_at(mapped: mmap.mmap, place: TensorPlace, algorithm: Algorithm) -> TensorInfo:
    hasher = new_hasher(algorithm)
    for begin in range(place.begin, place.end, _MAPPED_BYTES):
        end = min(begin + _MAPPED_BYTES, place.end)
        with memoryview(mapped) as view, view[begin:end] as data:
            hasher.update(data)
        # Pages that stayed would count as this process' memory.
        first = begin - begin % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, end - first)
    return tensor_info(
        name=place.name, dtype=place.dtype, shape=place.shape, digest=hasher.hexdigest(), algorithm=algorithm
    )


def _read_places(file_name: str, view: memoryview) -> tuple[TensorPlace, ...]:
    header_bytes = int.from_bytes(view[:_HEADER_LENGTH_BYTES], "little")
    data_start = _HEADER_LENGTH_BYTES + header_bytes
    if view.nbytes < _HEADER_LENGTH_BYTES or header_bytes > MAX_HEADER_BYTES or data_start > view.nbytes:
        raise MalformedWeightsError(f"{file_name}: its header does not fit the file")
    try:
        header = json.loads(bytes(view[_HEADER_LENGTH_BYTES:data_start]))
    except ValueError as error:
        raise MalformedWeightsError(f"{file_name}: its header is not JSON") from error
    if not isinstance(header, dict):
        raise MalformedWeightsError(f"{file_name}: its header is not a mapping")
    header.pop("__metadata__", None)
    places = [_read_place(file_name, name, value, data_start, view.nbytes) for name, value in header.items()]
    places.sort(key=lambda place: (place.begin, place.end))
    if any(first.end > second.begin for first, second in pairwise(places)):
        raise MalformedWeightsError(f"{file_name}: its tensors overlap")
    return tuple(sorted(places, key=lambda place: place.name))


def _read_place(file_name: str, name: str, value: object, data_start: int, file_bytes: int) -> TensorPlace:
    where = f"{file_name}: tensor {name[:MAX_NAME_CHARACTERS]!r}"
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS or _UNUSABLE.search(name):
        raise MalformedWeightsError(f"{where}: not a usable name")
    if not isinstance(value, dict) or value.get("dtype") not in _DTYPE_BYTES:
        raise MalformedWeightsError(f"{where}: no known element type")
    shape, offsets = _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise MalformedWeightsError(f"{where}: shape and data_offsets must be lists of sizes")
    begin, end = data_start + offsets[0], data_start + offsets[1]
    if end > file_bytes or end - begin != _tensor_bytes(value["dtype"], shape):
        raise MalformedWeightsError(f"{where}: its bytes do not fit its shape or the file")
    return TensorPlace(name=name, dtype=value["dtype"], shape=shape, begin=begin, end=end)


def _sizes(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 64 for size in value):
        return tuple(value)
    return None


def _tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"unknown element type {dtype!r}")
    return _DTYPE_BYTES[dtype] * math.prod(shape)
