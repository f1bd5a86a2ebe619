"""How groups are put into requests: as many as travel fast, and a large one alone."""

from __future__ import annotations

import pytest

from penstock.clients.trajectories import FILLED_BYTES_PER_PUT, MAX_BYTES_PER_PUT, split
from penstock.v1 import types_pb2


def group(size_bytes: int) -> types_pb2.TrajectoryGroup:
    return types_pb2.TrajectoryGroup(trajectories=[types_pb2.Trajectory(token_ids=bytes(size_bytes))])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([FILLED_BYTES_PER_PUT // 4] * 7, [3, 3, 1]),
        ([100, MAX_BYTES_PER_PUT - 1000, 100], [1, 1, 1]),
        ([100] * 5, [5]),
    ],
    ids=["full", "one that fills a request", "small"],
)
def test_requests_are_filled_up_to_a_size(sizes: list[int], expected: list[int]) -> None:
    assert [len(part) for part in split([group(size) for size in sizes])] == expected
