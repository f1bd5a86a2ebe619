"""What a later gradient is compared with is computed as samples come, and comes to what a pass at the end would."""

from functools import partial

import numpy as np
import pytest
import torch

from services.trainer.algorithms.base import Clip, Normalization
from services.trainer.algorithms.dr_grpo import DR_GRPO
from services.trainer.algorithms.loss import LossSettings, policy_loss
from services.trainer.algorithms.ppo import PPO
from services.trainer.algorithms.reinforce_plus_plus import REINFORCE_PLUS_PLUS
from services.trainer.algorithms.terms.correction import Correction
from services.trainer.config import TrainingConfig
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.model.model_loading import ModelSettings
from services.trainer.run_sections import OptimizerConfig
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import StepSettings, step_settings
from tests.unit.trainer.builders import RecordingBackend, build_group, save_tiny_qwen2

GROUPS = [build_group(name, [0.0, 1.0, 1.0], num_tokens=3 + number) for number, name in enumerate("abcdef")]


class CountingBackend(RecordingBackend):
    """Its log-probs are the tokens, negative under the reference."""

    def __init__(self):
        super().__init__()
        self.num_proximal = self.num_reference = 0

    def score_of(self, pack, quantity):
        self.num_proximal += quantity == "logprobs"
        self.num_reference += quantity == "reference_logprobs"
        return -pack.target_ids if quantity == "reference_logprobs" else pack.target_ids


def open_step(backend, algorithm, **changes):
    settings = {"policy_version": 0, "max_staleness": 0, "max_pack_tokens": 40, "algorithm": algorithm}
    settings |= {"normalization": Normalization.TOKENS, "num_minibatches": 2}
    return TrainingStep(backend, StepSettings(**settings | {"skip_zero_advantages": False} | changes))


@pytest.mark.parametrize("algorithm", [DR_GRPO, REINFORCE_PLUS_PLUS, PPO], ids=lambda algorithm: algorithm.name)
def test_all_passes_but_those_of_the_last_pack_are_made_before_the_batch_is_whole(algorithm):
    backend = CountingBackend()
    step = open_step(backend, algorithm, needs_proximal=True, needs_reference=algorithm is not PPO)
    for group in GROUPS:
        step.add_groups([group])
    early = backend.num_proximal
    assert early >= 2
    assert backend.packs == []
    step.finish()
    assert backend.num_proximal == early + 1
    assert backend.num_reference == (0 if algorithm is PPO else backend.num_proximal)
    for pack in backend.packs:
        np.testing.assert_array_equal(pack.proximal_logprobs, pack.target_ids)
        if algorithm is not PPO:
            np.testing.assert_array_equal(pack.reference_logprobs, -pack.target_ids)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"name": "grpo"}, (False, False)),
        ({"name": "grpo", "num_minibatches": 2}, (True, True)),
        ({"name": "grpo", "num_minibatches": 2, "correction": "none", "max_staleness": 0}, (False, True)),
        ({"name": "reinforce_plus_plus"}, (False, True)),
        ({"name": "ppo", "num_minibatches": 2}, (True, False)),
    ],
)
def test_what_is_computed_early_follows_from_the_configuration(algorithm, expected):
    document = {"model": {"path": "none"}, "data": {"train": None}, "algorithm": {"kl_coefficient": 0.1, **algorithm}}
    config = TrainingConfig.model_validate(document)
    settings = step_settings(config, policy_version=0)
    assert (settings.needs_proximal, settings.needs_reference) == expected


def weights_after(directory, *, is_early):
    loss = LossSettings(clip=Clip(low=0.2, high=0.2), kl_coefficient=0.5, correction=Correction.DECOUPLED)
    backend = RankBackend(
        model=ModelSettings(path=directory, keep_reference=True, loss_reads_reference=not is_early),
        optimizer=OptimizerConfig(learning_rate=0.03, max_grad_norm=1e6),
        loss=partial(policy_loss, algorithm=REINFORCE_PLUS_PLUS, settings=loss),
        seed=0,
    )
    for _ in range(2):
        step = open_step(backend, REINFORCE_PLUS_PLUS, needs_proximal=True, needs_reference=is_early)
        step.add_groups(GROUPS[:3])
        step.add_groups(GROUPS[3:])
        report = step.finish()
    return backend.state_tensors(), report.loss_metrics["reference_kl"]


def test_a_reference_read_early_teaches_what_one_read_with_the_gradient_does(tmp_path):
    directory = save_tiny_qwen2(tmp_path)
    early, early_kl = weights_after(directory, is_early=True)
    late, late_kl = weights_after(directory, is_early=False)
    assert early_kl == pytest.approx(late_kl, rel=1e-3)
    assert late_kl > 0.01
    for name, tensor in late.items():
        torch.testing.assert_close(early[name], tensor, rtol=1e-4, atol=1e-4)
