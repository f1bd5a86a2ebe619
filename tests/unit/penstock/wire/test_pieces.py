"""Cutting a group and joining it again is exact, and what is joined is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2
from penstock.wire import pieces
from penstock.wire.pieces import Assembly, spans
from services.broker.assembly import large_groups
from services.broker.assembly.large_groups import cut_group
from services.broker.records_pb2 import GroupRecord

_TRAJECTORIES = st.builds(
    types_pb2.Trajectory,
    token_ids=st.binary(max_size=40),
    behavior_logprobs=st.binary(max_size=40),
    loss_mask=st.binary(max_size=10),
    text=st.text(max_size=20),
    min_policy_version=st.integers(0, 2**62),
)
GROUPS = st.builds(
    types_pb2.TrajectoryGroup,
    prompt=st.builds(types_pb2.Prompt, group_id=st.text(max_size=20), token_ids=st.binary(max_size=40)),
    trajectories=st.lists(_TRAJECTORIES, max_size=8),
    min_policy_version=st.integers(0, 2**62),
)


@given(
    made=st.lists(GROUPS.filter(lambda group: group.ByteSize() > 0), min_size=1, max_size=4), size=st.integers(1, 80)
)
def test_groups_that_are_cut_one_after_the_other_are_joined_to_the_same(
    made: list[types_pb2.TrajectoryGroup], size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", size)
        assembly, joined = Assembly(), []
        for group in made:
            cut = list(cut_group(group))
            assert all(1 <= len(piece.data) <= size for piece in cut)
            assert [piece.is_last for piece in cut] == [False] * (len(cut) - 1) + [True]
            for piece in cut:
                whole = assembly.add(piece.data, is_last=piece.is_last)
                if whole is not None:
                    joined.append(types_pb2.TrajectoryGroup.FromString(bytes(whole)))
            assert len(assembly) == 0
    assert joined == made


@given(made=GROUPS, samples_at_once=st.integers(1, 8), size=st.integers(1, 80))
async def test_a_group_that_is_read_in_parts_is_the_group(
    made: types_pb2.TrajectoryGroup, samples_at_once: int, size: int
) -> None:
    """What `read_pieces` relies on: messages, one after the other, are one message of all their samples."""
    head = types_pb2.TrajectoryGroup(prompt=made.prompt, min_policy_version=made.min_policy_version)
    head_and_samples = [head] + [
        types_pb2.TrajectoryGroup(trajectories=made.trajectories[start : start + samples_at_once])
        for start in range(0, len(made.trajectories), samples_at_once)
    ]

    async def parts(*_arguments: object):  # type: ignore[no-untyped-def]
        for part in head_and_samples:
            yield part.SerializeToString()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_groups, "_group_parts", parts)
        patch.setattr(large_groups, "PIECE_BYTES", size)
        assembly = Assembly()
        whole = None
        async for piece in large_groups.read_pieces(None, GroupRecord()):  # type: ignore[arg-type]
            assert whole is None
            whole = assembly.add(piece.data, is_last=piece.is_last)
    assert whole is not None
    if not made.HasField("prompt"):
        made.prompt.SetInParent()
    assert types_pb2.TrajectoryGroup.FromString(bytes(whole)) == made


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_spans_cover_everything_once(size_bytes: int, piece_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", max(piece_bytes, size_bytes // 1000 + 1))
        found = list(spans(size_bytes))
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])][: len(found)]
    assert (found[-1][1] if found else 0) == size_bytes


def test_an_assembly_takes_no_more_than_its_bound() -> None:
    assembly = Assembly(max_bytes=10)
    assert assembly.add(b"12345", is_last=False) is None
    with pytest.raises(InvalidFieldError, match="more than 10 bytes"):
        assembly.add(b"678901", is_last=True)
    assert assembly.add(b"67890", is_last=True) == b"1234567890"


def test_the_largest_group_fits() -> None:
    """A token with everything it may have: id, log-prob, mask, advantage, and a version run of its own."""
    worst_bytes = pieces.MAX_GROUP_TOKENS * (4 + 4 + 1 + 4 + 12)
    assert worst_bytes + 48 * 1024 * 1024 <= pieces.MAX_GROUP_BYTES < 512 * 1024 * 1024
