"""Packs hold every token of every trajectory once, in order, with the right neighbours."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.batches.packing import (
    FULL_ENOUGH,
    Trajectory,
    divide,
    first_fit_decreasing,
    full_enough,
    join,
    pack_trajectories,
)
from tests.unit.trainer.builders import build_trajectory


def test_first_fit_decreasing_places_the_longest_first_where_there_is_room():
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], capacity=10) == [[1, 4], [0, 3, 2, 5]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 80))
def test_bins_hold_each_item_once_and_overflow_only_for_a_single_item(lengths, capacity):
    bins = first_fit_decreasing(lengths, capacity=capacity)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        assert sum(lengths[index] for index in members) <= capacity or len(members) == 1


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(2, 60), max_size=8), max_size=8), st.integers(20, 80))
def test_of_what_arrives_bit_by_bit_less_than_one_pack_waits_and_nothing_is_lost(arrivals, capacity):
    rng = np.random.default_rng(0)
    waiting, packed = [], []
    for lengths in arrivals:
        new = [build_trajectory(rng, num_prompt=1, num_completion=length - 1) for length in lengths]
        arrived = [*waiting, *new]
        due, waiting = full_enough(arrived, lengths=[item.token_ids.size for item in arrived], capacity=capacity)
        packs = pack_trajectories(due, max_pack_tokens=capacity)
        packed += [length for pack in packs for length in pack.segment_lengths]
        assert sum(trajectory.token_ids.size for trajectory in waiting) < FULL_ENOUGH * capacity
    left = [int(trajectory.token_ids.size) for trajectory in waiting]
    assert sorted(packed + left) == sorted(length for lengths in arrivals for length in lengths)


def test_short_trajectories_that_arrive_in_small_groups_fill_packs():
    rng = np.random.default_rng(0)
    waiting, fills = [], []
    for _ in range(64):
        new = [build_trajectory(rng, num_prompt=20, num_completion=int(rng.integers(10, 100))) for _ in range(8)]
        arrived = [*waiting, *new]
        due, waiting = full_enough(arrived, lengths=[item.token_ids.size for item in arrived], capacity=1024)
        packs = pack_trajectories(due, max_pack_tokens=1024)
        fills += [pack.num_tokens / 1024 for pack in packs]
    assert len(fills) > 30
    assert np.mean(fills) >= 0.95


def test_a_pack_lays_segments_side_by_side_with_positions_starting_again():
    long = Trajectory(
        token_ids=np.array([10, 11, 12, 13], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        behavior_logprobs=np.array([0, 0, -1, -2], dtype=np.float32),
        advantages=np.array([0, 0, 3, 4], dtype=np.float32),
    )
    short = Trajectory(
        token_ids=np.array([20, 21, 22], dtype=np.int32),
        loss_mask=np.array([False, True, False]),
        behavior_logprobs=np.array([0, -5, 0], dtype=np.float32),
        advantages=np.array([0, 6, 0], dtype=np.float32),
    )
    (pack,) = pack_trajectories([short, long], max_pack_tokens=7)
    assert pack.segment_lengths == (4, 3)
    assert pack.token_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert pack.logit_positions.tolist() == [1, 2, 4]
    assert pack.target_ids.tolist() == [12, 13, 21]
    assert pack.target_segments.tolist() == [0, 0, 1]
    assert pack.behavior_logprobs.tolist() == [-1, -2, -5]
    assert pack.advantages.tolist() == [3, 4, 6]


def test_packing_keeps_every_loss_token_with_its_logprob_and_advantage():
    rng = np.random.default_rng(3)
    trajectories = [
        build_trajectory(rng, num_prompt=int(rng.integers(1, 9)), num_completion=int(rng.integers(1, 30)))
        for _ in range(50)
    ]
    packs = pack_trajectories(trajectories, max_pack_tokens=64)
    found = sorted(
        row for pack in packs for row in zip(pack.target_ids, pack.behavior_logprobs, pack.advantages, strict=True)
    )
    expected = sorted(
        row
        for item in trajectories
        for row in zip(
            item.token_ids[item.loss_mask],
            item.behavior_logprobs[item.loss_mask],
            item.advantages[item.loss_mask],
            strict=True,
        )
    )
    assert found == expected
    assert sum(pack.num_tokens for pack in packs) == sum(item.token_ids.size for item in trajectories)
    assert all(pack.num_tokens <= 64 for pack in packs)


def test_numbers_of_loss_tokens_find_their_places_and_their_trajectories():
    rng = np.random.default_rng(6)
    items = [build_trajectory(rng, num_prompt=2, num_completion=number) for number in (4, 7)]
    pack = join(items, [1, 0])
    for member, numbers in pack.by_member(pack.advantages):
        placed = items[member].spread(numbers)
        assert placed.dtype == np.float32
        np.testing.assert_array_equal(placed, np.where(items[member].loss_mask, items[member].advantages, 0.0))


def test_no_trajectories_make_no_packs():
    assert pack_trajectories([], max_pack_tokens=8) == []


def test_a_trajectory_longer_than_the_budget_gets_a_pack_of_its_own():
    rng = np.random.default_rng(0)
    trajectories = [build_trajectory(rng, num_prompt=2, num_completion=n) for n in (3, 40, 3)]
    assert [pack.segment_lengths for pack in pack_trajectories(trajectories, max_pack_tokens=16)] == [(42,), (5, 5)]


def test_a_budget_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="capacity must be positive"):
        first_fit_decreasing([1], capacity=0)


@pytest.mark.parametrize(
    ("mask", "num_logprobs"), [([True, True, True], 3), ([False, True, True], 2), ([False, True], 3)]
)
def test_arrays_that_do_not_line_up_are_refused(mask, num_logprobs):
    with pytest.raises(ValueError, match="trajectory"):
        Trajectory(
            token_ids=np.array([1, 2, 3], dtype=np.int32),
            loss_mask=np.array(mask),
            behavior_logprobs=np.zeros(num_logprobs, dtype=np.float32),
            advantages=np.zeros(3, dtype=np.float32),
        )


@pytest.mark.parametrize("shape", [(1,), (2, 3)])
def test_a_trajectory_is_one_row_of_two_tokens_or_more(shape):
    with pytest.raises(ValueError, match="T >= 2"):
        Trajectory(
            token_ids=np.ones(shape, dtype=np.int32),
            loss_mask=np.zeros(shape, dtype=np.bool_),
            behavior_logprobs=np.zeros(shape, dtype=np.float32),
            advantages=np.zeros(shape, dtype=np.float32),
        )


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 8))
def test_a_divided_pack_is_what_its_trajectories_make_in_fewer_rows(lengths, most):
    rng = np.random.default_rng(0)
    trajectories = [build_trajectory(rng, num_prompt=2, num_completion=length) for length in lengths]
    parts = divide(join(trajectories, range(len(trajectories))), most)
    assert len(parts) <= most
    assert [member for part in parts for member in part.members] == list(range(len(trajectories)))
    for part in parts:
        for field in fields(part):
            expected = getattr(join(trajectories, part.members), field.name)
            np.testing.assert_array_equal(getattr(part, field.name), expected, err_msg=field.name)


def test_equal_trajectories_are_divided_evenly():
    rng = np.random.default_rng(0)
    trajectories = [build_trajectory(rng, num_prompt=2, num_completion=6) for _ in range(8)]
    assert [len(part.members) for part in divide(join(trajectories, range(8)), 4)] == [2, 2, 2, 2]
