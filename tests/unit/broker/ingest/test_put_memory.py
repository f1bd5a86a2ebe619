"""What a large put takes of memory at either end: its bytes, the message, and little beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from benchmarks.broker.large_groups import MemoryMeter, make_group
from penstock.v1 import types_pb2
from penstock.wire import pieces
from penstock.wire.codec import packed_parts
from penstock.wire.pieces import joined_pieces
from services.broker.ingest.trajectory_decoder import read_put
from tests.helpers.brokers.trajectories import pack_groups

NUM_SAMPLES, NUM_TOKENS = 512, 8_192
SIZE_BYTES = 8 * NUM_SAMPLES * NUM_TOKENS
MARGIN_BYTES = 8 * 1024 * 1024
"""Arrays are checked by as much at once."""


@pytest.fixture
def made() -> types_pb2.TrajectoryGroup:
    return make_group(NUM_SAMPLES, NUM_TOKENS)


@pytest.fixture
def packed(made: types_pb2.TrajectoryGroup) -> bytearray:
    return bytearray().join(packed_parts([made]))


def test_a_large_group_is_serialized_without_copies_beside_the_result(made: types_pb2.TrajectoryGroup) -> None:
    meter = MemoryMeter(os.getpid())
    num_bytes = sum(map(len, joined_pieces(packed_parts([made]))))
    assert SIZE_BYTES < num_bytes < 1.01 * SIZE_BYTES
    # Protobuf's own way took five times the size.
    assert meter.peak_bytes() < 1.5 * SIZE_BYTES


def test_a_large_put_is_checked_without_a_copy_of_its_arrays(packed: bytearray) -> None:
    meter = MemoryMeter(os.getpid())
    found = read_put(memoryview(packed), max_bytes=len(packed))
    assert found.faults == [""]
    # Parsed as one message it took one and a half times the size.
    assert meter.peak_bytes() < 0.5 * SIZE_BYTES


def test_so_is_one_of_short_samples_without_copies_beside_the_message() -> None:
    packed = bytearray().join(packed_parts([make_group(1_024, 2_048)]))
    meter = MemoryMeter(os.getpid())
    found = read_put(memoryview(packed), max_bytes=len(packed))
    assert found.faults == [""]
    assert meter.peak_bytes() < 1.6 * len(packed) + MARGIN_BYTES


def test_what_is_checked_in_parts_is_found_whole(made: types_pb2.TrajectoryGroup) -> None:
    made.trajectories[300].behavior_logprobs = b"\0\0\xc0\x7f" * NUM_TOKENS
    found = read_put(pack_groups([made]), max_bytes=2 * SIZE_BYTES)
    assert "behavior_logprobs" in found.faults[0]


def _odd_groups() -> Iterator[types_pb2.TrajectoryGroup]:
    whole = make_group(300, 1_024)
    yield whole
    without_prompt = types_pb2.TrajectoryGroup(trajectories=whole.trajectories, min_policy_version=7)
    yield without_prompt
    yield types_pb2.TrajectoryGroup()


def test_a_group_in_parts_is_byte_for_byte_the_message_and_so_are_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1_000)
    groups = list(_odd_groups())
    parts = packed_parts(groups)
    assert len(parts) > 600, "the large ones come by the sample"
    cut = list(joined_pieces(parts))
    assert {len(piece) for piece in cut[:-1]} == {1_000}
    assert b"".join(cut) == b"".join(parts) == pack_groups(groups)
