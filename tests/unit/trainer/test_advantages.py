"""Group-relative advantages against the papers' formulas."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.advantages import group_advantages


def test_grpo_divides_the_centred_reward_by_the_standard_deviation():
    rewards = [0.0, 1.0, 1.0, 0.25, 0.5]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    expected = [(reward - mean) / (std + 1e-6) for reward in rewards]
    np.testing.assert_allclose(group_advantages(np.array(rewards)), expected, rtol=1e-6)


def test_dr_grpo_keeps_the_scale_of_the_reward():
    advantages = group_advantages(np.array([3.0, 1.0, 2.0]), normalize_std=False)
    assert advantages.tolist() == [1.0, -1.0, 0.0]
    assert advantages.dtype == np.float32


@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero_although_their_mean_is_rounded(normalize_std):
    rewards = np.full(3, 0.1)
    assert rewards.mean() != 0.1
    assert not group_advantages(rewards, normalize_std=normalize_std).any()


def test_a_single_sample_has_no_advantage():
    assert group_advantages(np.array([5.0])).tolist() == [0.0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=32), st.booleans())
def test_advantages_sum_to_zero_and_order_like_rewards(rewards, normalize_std):
    values = np.array(rewards)
    advantages = group_advantages(values, normalize_std=normalize_std).astype(np.float64)
    assert abs(advantages.sum()) <= 1e-4 * max(1.0, np.abs(advantages).max()) * len(rewards)
    assert (np.diff(advantages[np.argsort(values)]) >= 0).all()


@pytest.mark.parametrize("rewards", [[], [[1.0, 2.0]], [1.0, float("nan")], [float("inf"), 0.0]])
def test_rewards_that_mean_nothing_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards must"):
        group_advantages(np.array(rewards, dtype=np.float64))
