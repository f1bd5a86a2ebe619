"""A critic's credit and loss against the printed formulas, one token after the other in Python floats."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.algorithms.ppo import value_losses
from services.trainer.algorithms.terms.gae import generalized_advantages, normalized

NUMBERS = st.floats(-5, 5)
SHARES = st.floats(0, 1)


def naive_advantages(rewards, values, discount, decay):
    """The backward recursion A_t = d_t + discount * decay * A_{t+1}."""
    result, later_advantage, later_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + discount * later_value - value
        later_advantage, later_value = delta + discount * decay * later_advantage, value
        result.append(later_advantage)
    return result[::-1]


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=70), SHARES, SHARES)
def test_advantages_are_those_of_the_backward_recursion(tokens, discount, decay):
    rewards, values = (list(column) for column in zip(*tokens, strict=True))
    found = generalized_advantages(np.array(rewards), np.array(values), discount=discount, decay=decay)
    np.testing.assert_allclose(found, naive_advantages(rewards, values, discount, decay), rtol=1e-9, atol=1e-9)


def test_with_decay_one_credit_is_what_still_comes_less_what_was_expected():
    rewards, values = np.array([0.0, -1.0, 3.0]), np.array([0.5, 1.0, 2.0])
    found = generalized_advantages(rewards, values, discount=1.0, decay=1.0)
    np.testing.assert_allclose(found, [1.5, 1.0, 1.0])


def test_a_sample_without_tokens_has_no_advantages():
    assert generalized_advantages(np.zeros(0), np.zeros(0), discount=1.0, decay=0.9).size == 0


def test_normalised_advantages_are_centred_and_of_one_scale():
    found = normalized(np.array([3.0, 5.0, 10.0]))
    assert found.mean() == pytest.approx(0.0)
    assert found.std() == pytest.approx(1.0)
    assert not normalized(np.full(4, 2.0)).any()


def test_value_losses_take_the_worse_of_free_and_clipped():
    values, old, returns = [0.1, 0.9, -1.0, 0.5], [0.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 0.5]
    found = value_losses(*(torch.tensor(column, dtype=torch.float64) for column in (values, old, returns)), clip=0.2)
    expected = []
    for value, before, target in zip(values, old, returns, strict=True):
        held = before + min(max(value - before, -0.2), 0.2)
        expected.append(max((value - target) ** 2, (held - target) ** 2) / 2)
    np.testing.assert_allclose(found, expected)
    # The second value is near its target but moved too far: it is charged as if it had moved by the clip alone.
    assert found[1] == pytest.approx(0.32)
