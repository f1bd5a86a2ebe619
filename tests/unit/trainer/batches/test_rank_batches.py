"""Dealing to processes of unlike strength: every trajectory once, tokens in proportion to shares."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.batches.packing import pack_trajectories
from services.trainer.batches.rank_partition import partition, place
from tests.unit.trainer.builders import build_trajectory

LENGTHS = st.lists(st.integers(2, 90), max_size=40)
SHARES = st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=2, max_size=4)


def trajectories(lengths):
    rng = np.random.default_rng(0)
    made = [build_trajectory(rng, num_prompt=1, num_completion=length - 1) for length in lengths]
    return [replace(trajectory, temperature=0.5 + index) for index, trajectory in enumerate(made)]


@settings(deadline=None)
@given(lengths=LENGTHS, shares=SHARES)
def test_each_is_dealt_once_and_packs_keep_to_their_shares(lengths, shares):
    rounds = partition(trajectories(lengths), max_pack_tokens=64, shares=shares)
    dealt = [length for packs in rounds for pack in packs if pack is not None for length in pack.segment_lengths]
    assert sorted(dealt) == sorted(lengths)
    for packs in rounds:
        assert len(packs) == len(shares)
        assert any(pack is not None for pack in packs)
        for pack, share in zip(packs, shares, strict=True):
            is_alone = pack is not None and len(pack.segment_lengths) == 1 and share == max(shares)
            assert pack is None or pack.num_tokens <= 64 * share / max(shares) or (is_alone and pack.num_tokens > 64)


def test_one_process_gets_the_packs_of_always():
    items = trajectories([9, 30, 4, 17, 25])
    expected = pack_trajectories(items, max_pack_tokens=40)
    found = [pack for (pack,) in partition(items, max_pack_tokens=40, shares=(5.0,))]
    assert [pack.segment_lengths for pack in found] == [pack.segment_lengths for pack in expected]


@pytest.mark.parametrize("shares", [(1.0, 1.0), (1.0, 3.0), (2.0, 1.0, 1.0)])
def test_rounds_are_balanced_by_share_and_the_longest_go_to_the_strongest(shares):
    lengths = np.random.default_rng(1).integers(10, 200, 200).tolist()
    rounds = partition(trajectories(lengths), max_pack_tokens=4096, shares=shares)
    totals = [sum(pack.num_tokens for pack in column if pack is not None) for column in zip(*rounds, strict=True)]
    speeds = [total / share for total, share in zip(totals, shares, strict=True)]
    assert max(speeds) / min(speeds) < 1.05
    longest = [max(pack.segment_lengths) for pack in rounds[0]]
    assert longest[int(np.argmax(shares))] == max(longest)


def test_one_far_longer_than_all_packs_of_a_round_is_dealt_too():
    ((pack, nothing),) = partition(trajectories([500]), max_pack_tokens=64, shares=(1.0, 1.0))
    assert (pack.segment_lengths, nothing) == ((500,), None)


def test_what_does_not_fit_needs_another_round():
    assert place([60, 60, 60], num_rounds=1, max_pack_tokens=64, shares=(1.0, 1.0)) is None
    assert len(partition(trajectories([39, 90]), max_pack_tokens=64, shares=(1.0, 1.0))) == 1
    assert len(partition(trajectories([60, 60, 60]), max_pack_tokens=64, shares=(1.0, 1.0))) == 2
    assert partition([], max_pack_tokens=64, shares=(1.0, 1.0)) == []
