"""Messages with packed groups in them, read in one go."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire import packed
from penstock.wire.codec import MAX_FIELDS, field_span, fields_of
from tests.helpers.brokers.trajectories import group, groups, pack_groups

GROUPS = broker_pb2.PutTrajectoriesRequest.GROUPS_FIELD_NUMBER


def request(*made: types_pb2.TrajectoryGroup) -> broker_pb2.PutTrajectoriesRequest:
    return broker_pb2.PutTrajectoriesRequest(run_id="r", producer_id="p", put_id="1", groups=pack_groups(made))


def test_a_put_is_read_with_its_groups() -> None:
    made = groups("a", "b")
    data = request(*made).SerializeToString()
    parsed = packed.PutTrajectoriesRequest.FromString(data)
    assert (parsed.run_id, parsed.producer_id, parsed.put_id) == ("r", "p", "1")
    assert list(parsed.groups.groups) == made
    start, end = field_span(fields_of(data), GROUPS)
    assert data[start:end] == pack_groups(made)


def test_a_microbatch_is_read_with_its_packed_groups_and_what_else_there_is() -> None:
    made = groups("a", "b", "c")
    microbatch = broker_pb2.Microbatch(
        microbatch_id="m", policy_version=3, groups=made[:1], packed_groups=pack_groups(made[1:])
    )
    response = broker_pb2.StreamMicrobatchesResponse(microbatch=microbatch)
    parsed = packed.StreamMicrobatchesResponse.FromString(response.SerializeToString())
    assert (parsed.microbatch.microbatch_id, parsed.microbatch.policy_version) == ("m", 3)
    assert [*parsed.microbatch.groups, *parsed.microbatch.packed_groups.groups] == made
    waiting = broker_pb2.StreamMicrobatchesResponse(waiting=broker_pb2.Waiting(reason="none"))
    parsed = packed.StreamMicrobatchesResponse.FromString(waiting.SerializeToString())
    assert (parsed.WhichOneof("frame"), parsed.waiting.reason) == ("waiting", "none")


def test_packed_groups_that_are_none_are_not_read() -> None:
    data = broker_pb2.PutTrajectoriesRequest(groups=b"\x0a\x02\x0a\x7f").SerializeToString()
    with pytest.raises(DecodeError):
        packed.PutTrajectoriesRequest.FromString(data)


def test_a_field_is_found_among_others_of_every_wire_type() -> None:
    others = b"\x28\xff\x01" + b"\x31" + bytes(8) + b"\x3d" + bytes(4) + b"\x42\x01x"
    data = others + request(group("a", num_tokens=400)).SerializeToString() + others
    start, end = field_span(fields_of(data), GROUPS)
    assert data[start:end] == pack_groups([group("a", num_tokens=400)])
    assert field_span(fields_of(others), GROUPS) == (0, 0)


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x22\x01a\x22\x01a", b"\x22", b"\x22\x80", b"\x28\x80", b"\x27\x01", b"\x80", b"\x22\x02a"),
        *(b"\x28" + b"\xff" * 10 + b"\1", b"\x28\1" * (MAX_FIELDS + 1)),
    ],
    ids=["twice", "no length", "cut length", "cut number", "unknown type", "cut tag", "cut field", "long", "many"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidFieldError, match="request"):
        field_span(fields_of(data), GROUPS)
