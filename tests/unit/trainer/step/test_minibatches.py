"""Several optimiser steps a batch: what is in which, under which weights ratios are anchored, and what they come to."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from services.trainer.algorithms.base import Clip, Normalization
from services.trainer.algorithms.dr_grpo import DR_GRPO
from services.trainer.algorithms.loss import LossSettings, policy_loss
from services.trainer.algorithms.ppo import PPO
from services.trainer.algorithms.terms.correction import Correction
from services.trainer.batches.packing import pack_trajectories
from services.trainer.batches.training_sample import trajectory_of
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.model.backend import NonFiniteLossError, PartialStepError
from services.trainer.model.model_loading import ModelSettings
from services.trainer.run_sections import OptimizerConfig
from services.trainer.step.passes import LossItem, split
from services.trainer.step.step import StepClosedError, TrainingStep
from services.trainer.step.step_settings import StepSettings
from tests.unit.trainer.builders import RecordingBackend, build_group, save_tiny_qwen2, scores_of

GROUPS = [build_group(name, [0.0, 1.0, 1.0], num_tokens=3 + number) for number, name in enumerate("abcdefg")]
CLIP = Clip(low=0.2, high=0.2)


class SteppingBackend(RecordingBackend):
    """Its log-probs are the number of optimiser steps taken."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.num_scored = 0
        self.step_of_pack = []
        self.lasts = []

    def forward_backward(self, *packs):
        self.step_of_pack.append(len(self.steps))
        return super().forward_backward(*packs)

    def score_of(self, pack, quantity):
        self.num_scored += 1
        return np.full(pack.num_loss_tokens, float(len(self.steps)))

    def optimizer_step(self, *, divisor, is_last=True):
        self.lasts.append(is_last)
        return super().optimizer_step(divisor=divisor)


def open_step(backend, **changes):
    settings = {"policy_version": 0, "max_staleness": 0, "max_pack_tokens": 40, "algorithm": DR_GRPO}
    settings |= {"normalization": Normalization.TOKENS, "num_minibatches": 3, "needs_proximal": True}
    return TrainingStep(backend, StepSettings(**settings | changes))


def items_of(sizes):
    return [
        LossItem(group_id=f"g{group}", sample_index=0, num_tokens=size, num_loss_tokens=size, trajectory=None)
        for group, size in enumerate(sizes)
        for _ in range(2)
    ]


def test_whole_groups_go_to_minibatches_of_about_as_many_tokens():
    items = items_of(np.random.default_rng(0).integers(5, 30, 32).tolist())
    minibatches = split(items, num_minibatches=4)
    homes = {item.group_id: number for number, members in enumerate(minibatches) for item in members}
    assert sorted(map(id, items)) == sorted(id(item) for members in minibatches for item in members)
    assert all(homes[item.group_id] == number for number, members in enumerate(minibatches) for item in members)
    loads = [sum(item.num_tokens for item in members) for members in minibatches]
    assert max(loads) < 1.05 * min(loads)


def test_minibatches_do_not_depend_on_the_order_of_arrival():
    items = items_of([9, 9, 9, 4, 4, 7])
    assert split(items, num_minibatches=3) == split(items[6:] + items[:6], num_minibatches=3)


def test_every_step_is_anchored_to_the_weights_before_the_first():
    backend = SteppingBackend()
    step = open_step(backend)
    step.add_groups(GROUPS[:5])
    assert backend.num_scored > 0
    assert (backend.packs, backend.steps) == ([], [])
    step.add_groups(GROUPS[5:])
    report = step.finish()
    assert set(backend.step_of_pack) == {0, 1, 2}
    assert all(pack.proximal_logprobs is not None and not pack.proximal_logprobs.any() for pack in backend.packs)
    assert (backend.lasts, sum(backend.steps)) == ([False, False, True], report.num_loss_tokens)
    assert (report.num_groups, report.num_samples) == (7, 21)


def test_a_critics_values_and_returns_are_those_of_before_the_first_step():
    class ValuingBackend(SteppingBackend):
        """Its values are one more than the number of optimiser steps taken."""

        def score_of(self, pack, quantity):
            assert quantity != "reference_logprobs"
            return super().score_of(pack, quantity) + (quantity == "values")

    backend = ValuingBackend()
    step = open_step(backend, algorithm=PPO, gae_lambda=1.0)
    step.add_groups(GROUPS)
    step.finish()
    assert set(backend.step_of_pack) == {0, 1, 2}
    for pack in backend.packs:
        np.testing.assert_array_equal(pack.values, 1.0)
        # Later rewards are not discounted: what comes back is the reward, whatever was expected.
        assert np.isin(pack.returns, [0.0, 1.0]).all()


def test_each_token_gets_its_own_proximal_log_prob():
    class TokenBackend(SteppingBackend):
        def score_of(self, pack, quantity):
            return pack.target_ids

    backend = TokenBackend()
    step = open_step(backend)
    step.add_groups(GROUPS)
    step.finish()
    for pack in backend.packs:
        np.testing.assert_array_equal(pack.proximal_logprobs, pack.target_ids)


def test_groups_without_credit_count_in_their_minibatchs_divisor():
    backend = SteppingBackend()
    step = open_step(backend, num_minibatches=2)
    step.add_groups([build_group("a", [1.0, 1.0]), build_group("b", [0.0, 1.0], num_tokens=6)])
    step.finish()
    assert sorted(backend.steps) == [4 + 5, 6 + 7]
    assert len(backend.packs) == 1


def test_a_ratio_to_the_behaviour_policy_needs_no_proximal_one():
    backend = SteppingBackend()
    step = open_step(backend, needs_proximal=False)
    step.add_groups(GROUPS)
    step.finish()
    assert (backend.num_scored, len(backend.steps)) == (0, 3)
    assert all(pack.proximal_logprobs is None for pack in backend.packs)


def poisoned_group(num_tokens):
    return [
        replace(sample, completion_token_ids=np.full_like(sample.completion_token_ids, 39))
        for sample in build_group("poisoned", [0.0, 1.0], num_tokens=num_tokens)
    ]


@pytest.mark.parametrize(("num_tokens", "num_taken", "error"), [(20, 0, NonFiniteLossError), (1, 7, PartialStepError)])
def test_only_before_the_first_step_a_batch_can_be_begun_again(num_tokens, num_taken, error):
    """The longest group is in the first minibatch, the shortest in the last."""
    backend = SteppingBackend(poison_token=39)
    step = open_step(backend, num_minibatches=8)
    step.add_groups([poisoned_group(num_tokens), *GROUPS])
    with pytest.raises(error, match="poisoned"):
        step.finish()
    assert (len(backend.steps), backend.num_discards) == (num_taken, 1)
    with pytest.raises(StepClosedError):
        step.finish()


def test_log_probs_that_are_not_finite_are_found_before_the_first_step():
    class PoisonedBackend(SteppingBackend):
        def score_of(self, pack, quantity):
            return np.where(pack.target_ids == 39, np.nan, 0.0)

    backend = PoisonedBackend()
    step = open_step(backend)
    step.add_groups(GROUPS)
    step.add_groups([poisoned_group(2)])
    with pytest.raises(NonFiniteLossError) as caught:
        step.finish()
    assert caught.value.group_ids == ("poisoned",)
    assert (backend.packs, backend.steps) == ([], [])


def real_backend(directory):
    return RankBackend(
        model=ModelSettings(path=directory),
        optimizer=OptimizerConfig(learning_rate=0.03, max_grad_norm=1e6),
        loss=partial(policy_loss, algorithm=DR_GRPO, settings=LossSettings(clip=CLIP, correction=Correction.DECOUPLED)),
        seed=0,
    )


def test_steps_of_minibatches_are_those_of_a_plain_ppo_loop(tmp_path):
    """Against a loop over single samples: AReaL's objective, written out, with a real model."""
    directory = save_tiny_qwen2(tmp_path)
    backend, plain = real_backend(directory), real_backend(directory)
    step = open_step(backend)
    step.add_groups(GROUPS[:3])
    step.add_groups(GROUPS[3:])
    report = step.finish()
    trajectories = {
        group[0].group_id: [
            trajectory_of(sample, credit)
            for sample, credit in zip(group, DR_GRPO.group_advantages(np.array([0.0, 1.0, 1.0])), strict=True)
        ]
        for group in GROUPS
    }
    packs = {
        name: [pack for each in group for pack in pack_trajectories([each], max_pack_tokens=40)]
        for name, group in trajectories.items()
    }
    proximal = {name: [scores_of(plain, pack) for pack in group] for name, group in packs.items()}
    # By hand: g is the longest, then f, e; each next goes to the least loaded.
    for names in ("gba", "fc", "ed"):
        num_tokens = 0
        for name in names:
            for pack, anchor in zip(packs[name], proximal[name], strict=True):
                logprobs = plain._logprobs(plain._model, pack)
                ratios = torch.exp(logprobs - torch.from_numpy(anchor))
                weights = torch.exp(torch.from_numpy(anchor - pack.behavior_logprobs))
                credit = torch.from_numpy(pack.advantages)
                held = ratios.clamp(0.8, 1.2) * credit
                (-weights * torch.minimum(ratios * credit, held)).sum().backward()
                num_tokens += pack.num_loss_tokens
        plain.optimizer_step(divisor=num_tokens)
    for name, tensor in plain.state_tensors().items():
        torch.testing.assert_close(backend.state_tensors()[name], tensor, rtol=1e-4, atol=1e-4)
    assert report.loss_metrics["clip_fraction"] > 0.05
