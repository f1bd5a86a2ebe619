"""Credits of groups and of steps against the papers' formulas."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.algorithms.base import Algorithm
from services.trainer.algorithms.registry import ALGORITHMS
from services.trainer.algorithms.terms.overlong import overlong_penalties

# A critic's credit is that of tokens: test_gae.py.
ESTIMATORS = {
    name: each.group_advantages or each.step_advantages for name, each in ALGORITHMS.items() if not each.has_critic
}


def normalized(rewards):
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def centered(rewards):
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def without_oneself(rewards):
    return [reward - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]


PRINTED = {
    "grpo": normalized,
    "dr_grpo": centered,
    "dapo": normalized,
    "gspo": normalized,
    "cispo": normalized,
    "rloo": without_oneself,
    "reinforce_plus_plus": normalized,
    "tba": centered,
    "distill": lambda rewards: [0.0] * len(rewards),
    "distill_with_reward": normalized,
}


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_credits_are_the_printed_ones(name):
    rewards = [0.0, 1.0, 1.0, 0.25, 0.5]
    found = ESTIMATORS[name](np.array(rewards))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, PRINTED[name](rewards), rtol=1e-6)


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_equal_rewards_give_exactly_zero_although_their_mean_is_rounded(name):
    rewards = np.full(3, 0.1)
    assert rewards.mean() != 0.1
    assert not ESTIMATORS[name](rewards).any()


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_a_single_sample_has_no_advantage(name):
    assert ESTIMATORS[name](np.array([5.0])).tolist() == [0.0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=32), st.sampled_from(list(ESTIMATORS)))
def test_credits_sum_to_zero_and_order_like_rewards(rewards, name):
    values = np.array(rewards)
    credits = ESTIMATORS[name](values).astype(np.float64)
    assert abs(credits.sum()) <= 1e-4 * max(1.0, np.abs(credits).max()) * len(rewards)
    assert (np.diff(credits[np.argsort(values)]) >= 0).all()


@pytest.mark.parametrize("rewards", [[], [[1.0, 2.0]], [1.0, float("nan")], [float("inf"), 0.0]])
@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_rewards_that_mean_nothing_are_refused(name, rewards):
    with pytest.raises(ValueError, match="rewards must"):
        ESTIMATORS[name](np.array(rewards, dtype=np.float64))


def test_overlong_answers_lose_up_to_one_over_the_buffer():
    lengths = np.array([1, 80, 90, 95, 100, 120])
    found = overlong_penalties(lengths, max_tokens=np.full(lengths.shape, 100), buffer_tokens=20)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.5, -0.75, -1.0, -1.0])
    assert not overlong_penalties(lengths, max_tokens=np.full(lengths.shape, 100), buffer_tokens=0).any()


@pytest.mark.parametrize("buffer_tokens", [-1, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer_tokens):
    with pytest.raises(ValueError, match="overlong_buffer_tokens must lie in"):
        overlong_penalties(np.array([1]), max_tokens=np.array([100]), buffer_tokens=buffer_tokens)


@pytest.mark.parametrize("both", [False, True])
def test_an_algorithm_has_exactly_one_estimator(both):
    some = ALGORITHMS["grpo"]
    estimate = some.group_advantages if both else None
    with pytest.raises(ValueError, match="one of"):
        Algorithm(
            name="x",
            surrogate=some.surrogate,
            clip=some.clip,
            normalization=some.normalization,
            group_advantages=estimate,
            step_advantages=estimate,
        )
