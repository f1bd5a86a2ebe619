"""Parses the groups of a put; the arrays of long samples stay where they arrived. Pure.

Protobuf copies an array twice before it can be checked: into the message, and out of it again. Of long samples that is
nearly all there is. So here what is around their arrays is parsed, and the arrays are found by their position.

Promise: what is parsed this way is what protobuf would parse. Everything but the arrays goes through it, and what is
not encoded in the usual way is left to it as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2
from penstock.wire.codec import Packed, field_prefix, fields_of, group_slices, prefix_size, read_varint

LONG_BYTES = 48 * 1024
"""Mean size of a put's samples from which on finding the arrays costs less than copying them."""
_TRAJECTORIES = types_pb2.TrajectoryGroup.TRAJECTORIES_FIELD_NUMBER
_ARRAYS = (
    types_pb2.Trajectory.TOKEN_IDS_FIELD_NUMBER,
    types_pb2.Trajectory.BEHAVIOR_LOGPROBS_FIELD_NUMBER,
    types_pb2.Trajectory.ADVANTAGES_FIELD_NUMBER,
)


@dataclass(slots=True)
class Arrays:
    """The arrays of samples, serialized, one of each kind a sample."""

    token_ids: Sequence[Packed]
    logprobs: Sequence[Packed]
    advantages: Sequence[Packed]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutMessages:
    """The groups of a put."""

    groups: Sequence[types_pb2.TrajectoryGroup]
    """Without their samples, if those are in `samples`."""
    samples: Sequence[Sequence[types_pb2.Trajectory]]
    """Of each group; without arrays, if those are in `arrays`."""
    arrays: Arrays | None = None
    """Of the samples of all groups; None if the samples have them."""

    @classmethod
    def of(cls, groups: Sequence[types_pb2.TrajectoryGroup]) -> PutMessages:
        """Of groups that are parsed whole."""
        return cls(groups=groups, samples=[list(group.trajectories) for group in groups])

    def arrays_of(self, samples: Sequence[types_pb2.Trajectory], start: int) -> Arrays:
        """The arrays of consecutive samples, the first of which has this number in the put; copies, if need be."""
        if self.arrays is None:
            return Arrays(
                [sample.token_ids for sample in samples],
                [sample.behavior_logprobs for sample in samples],
                [sample.advantages for sample in samples],
            )
        members, whole = slice(start, start + len(samples)), self.arrays
        return Arrays(whole.token_ids[members], whole.logprobs[members], whole.advantages[members])


class _UnusualError(Exception):
    """The bytes are left to protobuf."""


def parse_long(packed: Packed) -> PutMessages | None:
    """The groups of a put of long samples; None if they are not long, or not encoded in the usual way."""
    data = memoryview(packed)
    try:
        if read_varint(data, 1)[0] < LONG_BYTES:
            # The first group is short, and the others are probably like it.
            return None
        parts = [_without(data[start:end], (_TRAJECTORIES,)) for start, end in _bodies(data)]
        if len(data) < LONG_BYTES * sum(len(samples) for _rest, samples in parts):
            return None
        groups = [types_pb2.TrajectoryGroup.FromString(rest) for rest, _samples in parts]
        found = [[_sample_of(sample) for _number, sample in samples] for _rest, samples in parts]
    except (_UnusualError, InvalidFieldError, DecodeError, IndexError):
        return None
    arrays = [of_sample for samples in found for _sample, of_sample in samples]
    return PutMessages(
        groups=groups,
        samples=[[sample for sample, _arrays in samples] for samples in found],
        arrays=Arrays(*([of_sample.get(number, b"") for of_sample in arrays] for number in _ARRAYS)),
    )


def _bodies(data: memoryview) -> list[tuple[int, int]]:
    """Where each group begins and ends, its tag not included. Raises InvalidFieldError."""
    return [(start + prefix_size(data[start:end]), end) for start, end in group_slices(data)]


def _sample_of(data: memoryview) -> tuple[types_pb2.Trajectory, dict[int, memoryview]]:
    """A sample without its arrays, and these by field number."""
    rest, found = _without(data, _ARRAYS)
    arrays = dict(found)
    if len(arrays) < len(found):
        raise _UnusualError
    return types_pb2.Trajectory.FromString(rest), arrays


def _without(data: memoryview, numbers: Sequence[int]) -> tuple[bytes, list[tuple[int, memoryview]]]:
    """A serialized message without its fields of these numbers; and these fields' bytes."""
    rest: list[memoryview] = []
    found: list[tuple[int, memoryview]] = []
    kept = before = 0
    for number, start, end in fields_of(data):
        if number in numbers:
            if start - before != len(field_prefix(number, end - start)):
                raise _UnusualError
            found.append((number, data[start:end]))
            rest.append(data[kept:before])
            kept = end
        before = end
    rest.append(data[kept:])
    return b"".join(rest), found
