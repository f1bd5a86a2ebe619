"""Long samples are parsed around their arrays, and nothing else changes by that."""

from __future__ import annotations

from itertools import chain

import pytest

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import field_prefix, fields_of
from services.broker.ingest import put_messages
from services.broker.ingest.put_messages import PutMessages, parse_long
from services.broker.streams.trajectory_stream import read_request
from tests.helpers.brokers.trajectories import group, groups, pack_groups

GROUPS = broker_pb2.PutTrajectoriesRequest.GROUPS_FIELD_NUMBER
TOKEN_IDS = types_pb2.Trajectory.TOKEN_IDS_FIELD_NUMBER


@pytest.fixture(autouse=True)
def _all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_messages, "LONG_BYTES", 1)


def whole(found: PutMessages) -> list[types_pb2.TrajectoryGroup]:
    """The groups with their samples, and these with their arrays."""
    assert found.arrays is not None
    samples = list(chain.from_iterable(found.samples))
    arrays = found.arrays
    for sample, ids, logprobs, advantages in zip(
        samples, arrays.token_ids, arrays.logprobs, arrays.advantages, strict=True
    ):
        assert [sample.token_ids, sample.behavior_logprobs, sample.advantages] == [b"", b"", b""]
        sample.token_ids, sample.behavior_logprobs = bytes(ids), bytes(logprobs)
        sample.advantages = bytes(advantages)
    for each, members in zip(found.groups, found.samples, strict=True):
        each.trajectories.extend(members)
    return list(found.groups)


def test_arrays_are_found_by_position_and_the_rest_is_parsed() -> None:
    made = [group("a", num_samples=1), *groups("b", "c")]
    made[0].trajectories[0].advantages = bytes(12)
    made[1].trajectories[1].ClearField("token_ids")
    found = parse_long(pack_groups(made))
    assert found is not None
    assert whole(found) == made


def test_short_samples_are_left_to_protobuf(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_groups(groups("a", "b"))
    monkeypatch.setattr(put_messages, "LONG_BYTES", len(packed) // 4 + 1)
    assert parse_long(packed) is None, "four samples"
    monkeypatch.setattr(put_messages, "LONG_BYTES", len(packed) // 4)
    assert parse_long(packed) is not None


def _with_sample(sample: bytes) -> bytes:
    """A put of one group of this sample."""
    body = field_prefix(2, len(sample)) + sample
    return field_prefix(1, len(body)) + body


@pytest.mark.parametrize(
    "packed",
    [
        _with_sample(b"\x1a\x04abcd\x1a\x04abcd"),
        _with_sample(b"\x1a\x84\x00abcd"),
        _with_sample(b"\x9a\x00\x04abcd"),
        _with_sample(b"\x18\x04"),
        _with_sample(b"\x1a\x05abcd"),
        _with_sample(b"\x0a\x01\xff"),
        _with_sample(b"\x8a\x01\x01\xff"),
        b"\x0a\x05\x12\x82\x00\x10\x01",
        b"\x0a\x02\x0a\x7f",
        b"\x0a",
        b"",
    ],
    ids=[
        *("array twice", "long length", "long tag", "number for an array", "cut array", "no key", "no text"),
        *("long sample", "no prompt", "no length", "nothing"),
    ],
)
def test_what_is_not_encoded_in_the_usual_way_is_left_to_protobuf(packed: bytes) -> None:
    assert parse_long(packed) is None


def test_a_request_is_read_around_its_groups_however_it_is_encoded() -> None:
    made = groups("a", "b")
    head = broker_pb2.PutTrajectoriesRequest(run_id="r", producer_id="p", put_id="1").SerializeToString()
    packed = pack_groups(made)
    prefix = field_prefix(GROUPS, len(packed))
    overlong = prefix[:-1] + bytes((prefix[-1] | 0x80, 0))
    for data in (head + prefix + packed, prefix + packed + head, head + overlong + packed):
        request, put = read_request(data, fields_of(data))
        assert (request.run_id, request.producer_id, request.put_id) == ("r", "p", "1")
        assert (put.groups.group_ids, put.groups.faults) == (["a", "b"], ["", ""])
        assert put.payload == packed
