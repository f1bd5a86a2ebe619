"""Credit that needs more than rewards: a critic's, and rewards less a KL."""

import numpy as np
import pytest

from services.trainer.algorithms.ppo import PPO
from services.trainer.algorithms.tba import TBA
from services.trainer.algorithms.terms.gae import generalized_advantages
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import StepSettings
from tests.unit.trainer.builders import RecordingBackend, build_group, build_sample


def settings(algorithm, **changes):
    return StepSettings(
        **{
            "policy_version": 0,
            "max_staleness": 0,
            "max_pack_tokens": 1000,
            "algorithm": algorithm,
            "normalization": algorithm.normalization,
            "skip_zero_advantages": not algorithm.has_critic,
        }
        | changes
    )


def trained(algorithm, calls, **changes):
    """What reached the backend, by group and sample: the pack's numbers of each segment."""
    backend = RecordingBackend()
    step = TrainingStep(backend, settings(algorithm, **changes))
    for groups in calls:
        step.add_groups(groups)
    step.finish()
    return backend, {
        tuple(pack.target_ids[pack.target_segments == segment].tolist()): {
            name: None if column is None else column[pack.target_segments == segment]
            for name, column in (("advantages", pack.advantages), ("values", pack.values), ("returns", pack.returns))
        }
        for pack in backend.packs
        for segment in range(len(pack.segment_lengths))
    }


def values_of(sample):
    return sample.completion_token_ids / 100


def kl_of(sample, coefficient):
    return coefficient * sample.completion_token_ids / 1000


def test_a_critics_credit_is_what_came_beyond_what_it_expected_normalised_over_the_step():
    groups = [build_group("g0", [1.0, 0.0]), build_group("g1", [0.5, 0.5, 1.0], num_tokens=6)]
    _, found = trained(PPO, [groups], reward_kl_coefficient=2.0, gae_lambda=0.9)
    samples = [sample for group in groups for sample in group]
    raw = []
    for sample in samples:
        rewards = -kl_of(sample, 2.0)
        rewards[-1] += sample.reward
        raw.append(generalized_advantages(rewards, values_of(sample), discount=1.0, decay=0.9))
    every = np.concatenate(raw)
    assert len(found) == len(samples) == 5
    for sample, advantages in zip(samples, raw, strict=True):
        columns = found[tuple(sample.completion_token_ids.tolist())]
        expected = (advantages - every.mean()) / every.std()
        np.testing.assert_allclose(columns["advantages"], expected, rtol=1e-4)
        np.testing.assert_allclose(columns["values"], values_of(sample), rtol=1e-5)
        np.testing.assert_allclose(columns["returns"], advantages + values_of(sample), rtol=1e-4)


def test_a_critics_credit_does_not_depend_on_how_groups_came_or_were_packed():
    groups = [build_group("g0", [1.0, 0.0]), build_group("g1", [0.5, 0.5, 1.0], num_tokens=6)]
    _, whole = trained(PPO, [groups])
    backend, split = trained(PPO, [[groups[1]], [groups[0]]], max_pack_tokens=1)
    assert len(backend.packs) == 5
    for tokens, columns in whole.items():
        for name, column in columns.items():
            np.testing.assert_allclose(split[tokens][name], column, rtol=1e-5)


def test_tools_output_between_turns_is_worth_nothing_and_gets_no_credit():
    mask = np.array([True, True, False, False, True])
    sample = build_sample(num_tokens=5, reward=1.0, loss_mask=mask)
    _, found = trained(PPO, [[[sample, build_sample(index=1, num_tokens=4, reward=0.0)]]])
    columns = found[tuple(sample.completion_token_ids[mask].tolist())]
    raw = generalized_advantages(np.array([0.0, 0.0, 1.0]), values_of(sample)[mask], discount=1.0, decay=1.0)
    np.testing.assert_allclose(columns["returns"], raw + values_of(sample)[mask], rtol=1e-5)


def test_equal_rewards_still_teach_a_critic():
    backend, found = trained(PPO, [[build_group("g0", [0.0, 0.0])]])
    assert len(found) == 2
    assert all(columns["returns"] is not None for columns in found.values())
    assert len(backend.steps) == 1


def test_rewards_less_their_kl_decide_the_credit_of_trajectory_balance():
    group = build_group("g0", [1.0, 0.0, 0.5])
    _, found = trained(TBA, [[group]], reward_kl_coefficient=4.0)
    penalised = np.array([sample.reward - kl_of(sample, 4.0).sum() for sample in group])
    for sample, credit in zip(group, penalised - penalised.mean(), strict=True):
        columns = found[tuple(sample.completion_token_ids.tolist())]
        np.testing.assert_allclose(columns["advantages"], np.full(sample.completion_token_ids.size, credit), rtol=1e-5)
        assert columns["returns"] is None


@pytest.mark.parametrize("algorithm", [PPO, TBA])
def test_a_sample_that_brings_its_own_advantages_keeps_them(algorithm):
    own = np.array([0.25, -0.5, 0.75, 1.0], dtype=np.float32)
    group = [build_sample(advantages=own), build_sample(index=1, reward=0.0)]
    _, found = trained(algorithm, [[group]], reward_kl_coefficient=1.0)
    np.testing.assert_array_equal(found[tuple(group[0].completion_token_ids.tolist())]["advantages"], own)
