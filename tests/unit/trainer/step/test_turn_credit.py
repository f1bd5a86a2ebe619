"""Credit by turns: each turn is judged by what came from it on; the limits are the algorithms' own credit."""

import numpy as np
import pytest

from penstock.config import ConfigError, validate
from services.trainer.algorithms.grpo import GRPO, group_advantages
from services.trainer.algorithms.ppo import PPO
from services.trainer.algorithms.terms.gae import normalized
from services.trainer.algorithms.terms.turns import group_turn_advantages, turn_critic_advantages, turn_of_tokens
from services.trainer.config import TrainingConfig
from tests.unit.trainer.builders import build_sample
from tests.unit.trainer.step.test_step_advantages import trained, values_of

MASK = np.array([True, True, False, True, False, False, True, True])
"""Three turns, of two, one and two tokens."""


def session(values, *, index, mask=MASK, reward=None):
    return build_sample(
        index=index,
        num_tokens=mask.size,
        reward=float(np.sum(values)) if reward is None else reward,
        loss_mask=mask,
        turn_values=None if values is None else np.array(values, np.float32),
    )


def credit(samples, algorithm=GRPO, **changes):
    """The advantage of each trained token of each sample."""
    backend, found = trained(algorithm, [[samples]], **changes)
    keys = [tuple(sample.completion_token_ids[sample.loss_mask].tolist()) for sample in samples]
    return backend, [found.get(key) for key in keys]


def test_turns_are_the_runs_of_trained_tokens():
    assert turn_of_tokens(MASK).tolist() == [0, 0, 1, 2, 2]
    assert turn_of_tokens(np.array([False, True, True])).tolist() == [0, 0]


def test_a_turn_is_credited_with_what_it_and_later_turns_earned():
    samples = [session([1.0, 0.0, 0.5], index=0), session([0.0, 2.0, 0.0], index=1), session([0.0, 1.0, 1.0], index=2)]
    _, found = credit(samples, turn_discount=0.5)
    returns = np.array([[1.125, 0.25, 0.5], [1.0, 2.0, 0.0], [0.75, 1.5, 1.0]])
    for row, columns in enumerate(found):
        expected = [group_advantages(returns[:, turn])[row] for turn in (0, 0, 1, 2, 2)]
        np.testing.assert_allclose(columns["advantages"], expected, rtol=1e-5)


def test_what_a_sample_earned_before_a_turn_does_not_count_for_it():
    early, late = session([5.0, 0.0, 1.0], index=0), session([0.0, 0.0, 1.0], index=1)
    _, [one, other] = credit([early, late], turn_discount=1.0)
    assert one["advantages"].tolist()[2:] == other["advantages"].tolist()[2:] == [0.0, 0.0, 0.0]
    assert one["advantages"][0] > 0 > other["advantages"][0]


def test_only_siblings_that_got_to_a_turn_are_compared():
    found = group_turn_advantages(
        [np.array([1.0]), np.array([0.0, 1.0]), np.array([0.0, 0.0])], group_advantages, discount=1.0
    )
    np.testing.assert_allclose(found[0], group_advantages(np.array([1.0, 1.0, 0.0]))[:1])
    np.testing.assert_allclose([found[1][1], found[2][1]], group_advantages(np.array([1.0, 0.0])))
    alone = group_turn_advantages([np.array([1.0, 7.0]), np.array([0.0])], group_advantages, discount=0.0)
    assert alone[0][1] == 0.0


def test_with_one_turn_it_is_the_algorithms_own_credit():
    whole = np.ones(4, np.bool_)
    samples = [session([value], index=index, mask=whole) for index, value in enumerate((0.3, 1.0, 0.2))]
    _, by_turn = credit(samples, turn_discount=0.7)
    _, by_sample = credit(samples)
    for one, other in zip(by_turn, by_sample, strict=True):
        np.testing.assert_allclose(one["advantages"], other["advantages"], rtol=1e-5)


def test_a_reward_that_no_turn_explains_counts_at_the_end():
    samples = [session(None, index=0, reward=1.0), session(None, index=1, reward=0.0)]
    _, by_turn = credit(samples, turn_discount=1.0)
    _, by_sample = credit(samples)
    for one, other in zip(by_turn, by_sample, strict=True):
        np.testing.assert_allclose(one["advantages"], other["advantages"])
    _, [first, _] = credit(samples, turn_discount=0.0)
    assert first["advantages"].tolist()[:3] == [0.0, 0.0, 0.0]


def test_equal_turns_teach_nothing_whatever_rounds_off():
    values = [0.1, 0.2, 0.7]
    backend, _ = credit([session(values, index=index, reward=sum(values)) for index in range(2)], turn_discount=1.0)
    assert backend.packs == []


def test_a_critic_of_turns_shares_a_turns_advantage_among_its_tokens():
    samples = [session([1.0, 0.0, 0.5], index=0), session([0.0, 2.0, 0.0], index=1)]
    _, found = credit(samples, PPO, turn_discount=0.9, gae_lambda=0.5)
    raw = []
    for sample in samples:
        values = values_of(sample)[MASK]
        at_turns = [values[0], values[2], values[3]]
        later, advantages = 0.0, []
        for turn in (2, 1, 0):
            after = at_turns[turn + 1] if turn < 2 else 0.0
            later = sample.turn_values[turn] + 0.9 * after - at_turns[turn] + 0.9 * 0.5 * later
            advantages.insert(0, later)
        raw.append((np.array(advantages)[[0, 0, 1, 2, 2]], np.array(at_turns)[[0, 0, 1, 2, 2]]))
    every = normalized(np.concatenate([advantages for advantages, _ in raw]))
    for columns, expected, (advantages, values) in zip(found, np.split(every, 2), raw, strict=True):
        np.testing.assert_allclose(columns["advantages"], expected, rtol=1e-3)
        np.testing.assert_allclose(columns["returns"], advantages + values, rtol=1e-4)


def test_the_limit_of_one_turn_is_the_trajectory_level_critic():
    values, turns = np.array([0.4, 0.1, 0.9]), np.zeros(3, np.int64)
    advantages, targets = turn_critic_advantages(np.array([2.0]), values, turns, discount=0.3, decay=0.5)
    np.testing.assert_allclose(advantages, [1.6, 1.6, 1.6])
    np.testing.assert_allclose(targets, [2.0, 2.0, 2.0])


def test_the_limit_of_rewards_alone_is_the_return_from_each_turn_on():
    values, turns = np.array([0.4, 0.1, 0.9]), np.array([0, 1, 1])
    advantages, targets = turn_critic_advantages(np.array([2.0, 1.0]), values, turns, discount=1.0, decay=1.0)
    np.testing.assert_allclose(advantages, [2.6, 0.9, 0.9])
    np.testing.assert_allclose(targets, [3.0, 1.0, 1.0])


def test_a_sample_with_values_for_other_turns_is_left_out():
    bad = session([1.0, 1.0], index=0)
    backend, _ = credit([bad, session([0.0, 0.0, 0.0], index=1), session([0.0, 0.0, 1.0], index=2)], turn_discount=1.0)
    assert sum(len(pack.segment_lengths) for pack in backend.packs) == 2


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "tba"])
def test_algorithms_that_need_whole_samples_refuse_it(name):
    document = {"model": {"path": "m"}, "data": {"train": "d"}}
    document["algorithm"] = {"name": name, "turn_discount": 1.0, "kl_coefficient": 0.1}
    with pytest.raises(ConfigError, match=r"algorithm\.turn_discount"):
        validate(TrainingConfig, document, source="run.yaml")
