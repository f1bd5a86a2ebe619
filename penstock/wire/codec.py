"""Arrays on the wire: raw little-endian bytes, checked on the way in.

Token ids are int32, log-probs float32, versions int64, masks uint8. Everything decoded here is a read-only view of the
message's own bytes, so decoding costs no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
_FIXED_BYTES = {1: 8, 5: 4}
"""Size of protobuf's wire types of fixed size."""
_TRAJECTORIES = types_pb2.TrajectoryGroup.TRAJECTORIES_FIELD_NUMBER
SERIALIZED_WHOLE_BYTES = 1024 * 1024
"""Of token ids and routes in a group: with more it is large."""
Packed = bytes | memoryview
"""A serialized TrajectoryGroups, or a part of one."""
MAX_FIELDS = 4_096
"""Of one message that is read field by field here: its size alone would allow millions, unknown ones among them."""
_VARINT_BITS = 70
"""In ten bytes: protobuf refuses longer varints."""


def int32_bytes(values: Sequence[int] | Int32) -> bytes:
    """Little-endian int32 bytes of `values`, [n]."""
    return np.asarray(values, dtype=_INT32).tobytes()


def float32_bytes(values: Sequence[float] | Float32) -> bytes:
    """Little-endian float32 bytes of `values`, [n]."""
    return np.asarray(values, dtype=_FLOAT32).tobytes()


def int32_array(data: bytes, field: str) -> Int32:
    """The int32[n] in `data`; raises InvalidFieldError naming `field` if the length does not fit."""
    return _array(data, _INT32, field)


def int64_array(data: bytes, field: str) -> Int64:
    """The int64[n] in `data`; raises InvalidFieldError naming `field` if the length does not fit."""
    return _array(data, _INT64, field)


def float32_array(data: bytes, field: str) -> Float32:
    """The float32[n] in `data`; raises InvalidFieldError naming `field` if the length does not fit."""
    return _array(data, _FLOAT32, field)


def _array(data: bytes, dtype: np.dtype, field: str) -> npt.NDArray:  # type: ignore[type-arg]
    if len(data) % dtype.itemsize:
        raise InvalidFieldError(
            f"{field}: {len(data)} bytes are not a whole number of {dtype.itemsize}-byte elements", field=field
        )
    return np.frombuffer(data, dtype=dtype)


def encode_versions(versions: Sequence[int] | Int64) -> types_pb2.VersionRuns:
    """Run-length code of per-token policy versions, [n]."""
    array = np.asarray(versions, dtype=_INT64)
    if array.size == 0:
        return types_pb2.VersionRuns()
    starts = _run_starts(array)
    lengths = np.diff(np.concatenate((starts, [array.size])))
    return types_pb2.VersionRuns(versions=array[starts].tobytes(), lengths=lengths.astype(_INT32).tobytes())


def decode_versions(runs: types_pb2.VersionRuns, *, num_tokens: int, field: str) -> Int64:
    """Per-token policy versions, int64[num_tokens]; raises InvalidFieldError if the runs do not add up."""
    versions = int64_array(runs.versions, f"{field}.versions")
    lengths = int32_array(runs.lengths, f"{field}.lengths")
    if versions.size != lengths.size:
        raise InvalidFieldError(
            f"{field}: {versions.size} versions but {lengths.size} run lengths; send one length per version",
            field=field,
        )
    if lengths.size and (int(lengths.min()) < 1 or int(versions.min()) < 0):
        raise InvalidFieldError(f"{field}: run lengths must be >= 1 and versions >= 0", field=field)
    if int(lengths.sum(dtype=np.int64)) != num_tokens:
        raise InvalidFieldError(
            f"{field}: run lengths add up to {int(lengths.sum(dtype=np.int64))}, but there are {num_tokens} tokens",
            field=field,
        )
    return np.repeat(versions, lengths)


def join_versions(parts: Sequence[types_pb2.VersionRuns]) -> types_pb2.VersionRuns:
    """The runs of consecutive chunks as one; neighbouring runs of one version are left apart, which is still valid."""
    return types_pb2.VersionRuns(
        versions=b"".join(part.versions for part in parts), lengths=b"".join(part.lengths for part in parts)
    )


def merge_versions(runs: types_pb2.VersionRuns) -> types_pb2.VersionRuns:
    """The same versions in as few runs as they fit; `runs` must be such as `decode_versions` takes."""
    versions, lengths = np.frombuffer(runs.versions, _INT64), np.frombuffer(runs.lengths, _INT32)
    if versions.size < 2:
        return runs
    starts = _run_starts(versions)
    return types_pb2.VersionRuns(
        versions=versions[starts].tobytes(), lengths=np.add.reduceat(lengths, starts, dtype=_INT32).tobytes()
    )


def _run_starts(versions: Int64) -> npt.NDArray[np.intp]:
    """Where versions [n], n >= 1, differ from the one before; 0 is first."""
    return np.flatnonzero(np.concatenate(([True], versions[1:] != versions[:-1])))


def packed_parts(groups: Iterable[types_pb2.TrajectoryGroup]) -> list[bytes]:
    """A serialized TrajectoryGroups in parts, without the copy of each group that a message of them would take."""
    parts: list[bytes] = []
    for group in groups:
        inner = group_parts(group)
        parts += (field_prefix(1, sum(map(len, inner))), *inner)
    return parts


def group_parts(group: types_pb2.TrajectoryGroup) -> list[bytes]:
    """A serialized TrajectoryGroup in parts; in one where it is not large.

    Serializing a message takes up to four times its size beside the result, so a large group is done by the sample.
    """
    samples = group.trajectories
    if len(samples) < 2 or sum(len(each.token_ids) + len(each.routes) for each in samples) < SERIALIZED_WHOLE_BYTES:
        return [group.SerializeToString()]
    head = types_pb2.TrajectoryGroup(prompt=group.prompt if group.HasField("prompt") else None)
    parts = [head.SerializeToString()]
    for sample in samples:
        data = sample.SerializeToString()
        parts += (field_prefix(_TRAJECTORIES, len(data)), data)
    parts.append(types_pb2.TrajectoryGroup(min_policy_version=group.min_policy_version).SerializeToString())
    return parts


def field_prefix(number: int, size_bytes: int) -> bytes:
    """The tag and length before a length-delimited protobuf field, 1 <= number <= 15."""
    return bytes((number << 3 | 2,)) + _varint(size_bytes)


def prefix_size(data: Packed) -> int:
    """Length of a field's `field_prefix`, for well-formed `data`."""
    at = 1
    while data[at] > 0x7F:
        at += 1
    return at + 1


def _varint(value: int) -> bytes:
    """Protobuf's base-128 varint of a non-negative number."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def group_slices(packed: Packed) -> list[tuple[int, int]]:
    """Where each group of a serialized TrajectoryGroups begins and ends, its tag included.

    Raises InvalidFieldError where the bytes are not one group after the other.
    """
    slices: list[tuple[int, int]] = []
    start, size = 0, len(packed)
    while start < size:
        length, shift, at = 0, 0, start + 1
        while at < size and packed[at] > 0x7F and shift < 28:
            length |= (packed[at] & 0x7F) << shift
            shift += 7
            at += 1
        end = at + 1 + (length | packed[at] << shift) if at < size else size + 1
        if packed[start] != 0x0A or end > size:
            raise InvalidFieldError(f"groups: byte {start} of {size} begins no whole TrajectoryGroup", field="groups")
        slices.append((start, end))
        start = end
    return slices


Fields = list[tuple[int, int, int]]
"""Number of each field of a serialized message, and where its bytes begin and end; a number begins at -1."""


def field_span(fields: Fields, number: int) -> tuple[int, int]:
    """Position of a length-delimited field in a serialized message; (0, 0) if unset.

    Raises InvalidFieldError where the field comes twice.
    """
    found = (0, 0)
    for tag_number, start, end in fields:
        if tag_number == number and start >= 0:
            if found != (0, 0):
                raise InvalidFieldError(f"request: field {number} comes twice", field="request")
            found = (start, end)
    return found


def fields_of(data: Packed) -> Fields:
    """The fields of a serialized message, in order.

    Raises InvalidFieldError where `data` is not well-formed, or has more than MAX_FIELDS.
    """
    fields: Fields = []
    at = 0
    try:
        while at < len(data):
            tag, at = read_varint(data, at) if data[at] > 0x7F else (data[at], at + 1)
            kind, start = tag & 7, -1
            if kind == 2:
                size_bytes, start = read_varint(data, at) if data[at] > 0x7F else (data[at], at + 1)
                at = start + size_bytes
            elif kind == 0:
                _value, at = read_varint(data, at)
            else:
                at += _FIXED_BYTES[kind]
            fields.append((tag >> 3, start, at))
            if len(fields) > MAX_FIELDS:
                raise InvalidFieldError(f"request: more than {MAX_FIELDS} fields; send fewer", field="request")
    except (IndexError, KeyError) as error:
        raise InvalidFieldError(f"request: byte {at} of {len(data)} begins no field", field="request") from error
    if at > len(data):
        raise InvalidFieldError(f"request: its {len(data)} bytes end inside a field", field="request")
    return fields


def read_varint(data: Packed, at: int) -> tuple[int, int]:
    """A varint and where it ends. Raises IndexError where `data` ends first, or the varint is too long."""
    value = shift = 0
    while data[at] > 0x7F:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if shift == _VARINT_BITS:
            raise IndexError(at)
    return value | data[at] << shift, at + 1


def index_mask(indices: Iterable[int]) -> bytes:
    """Indices as a bit mask: index i is bit i % 8 of byte i / 8."""
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def masked_indices(mask: bytes) -> frozenset[int]:
    """The indices of a bit mask; see `index_mask`."""
    bits = int.from_bytes(mask, "little")
    return frozenset(index for index in range(bits.bit_length()) if bits >> index & 1)
