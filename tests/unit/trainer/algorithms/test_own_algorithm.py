"""An algorithm of one's own is one object in the registry: a configuration names it, and steps are taken with it."""

import numpy as np
import pytest

from services.trainer.algorithms.base import Algorithm, Clip, Normalization, Surrogate
from services.trainer.algorithms.registry import ALGORITHMS
from services.trainer.config import TrainingConfig
from services.trainer.run.policy_loading import local_backend
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import step_settings
from tests.unit.trainer.builders import build_group, save_tiny_qwen2


def best_of_group(rewards):
    return (rewards == rewards.max()).astype(np.float32)


def imitation(terms, clip):
    return Surrogate(losses=-terms.advantages * terms.logprobs)


BEST_OF_GROUP = Algorithm(
    name="best_of_group",
    group_advantages=best_of_group,
    surrogate=imitation,
    clip=Clip(low=1.0, high=0.0),
    normalization=Normalization.SAMPLES,
)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, BEST_OF_GROUP.name, BEST_OF_GROUP)


def test_an_algorithm_in_the_registry_is_configured_and_trained_with(registered, tmp_path):
    config = TrainingConfig.model_validate(
        {
            "model": {"path": save_tiny_qwen2(tmp_path)},
            "data": {"train": None},
            "algorithm": {"name": "best_of_group", "max_staleness": 0, "correction": "none"},
            "optimizer": {"learning_rate": 0.01},
        }
    )
    group = build_group("g0", [1.0, 0.0])
    backend = local_backend(config)

    def step():
        step = TrainingStep(backend, step_settings(config, policy_version=0))
        step.add_groups([group])
        return step.finish()

    first, second = step(), step()
    # Only the best sample teaches; both count in the mean, and what is imitated becomes likelier.
    assert (first.num_samples, first.loss_metrics["clip_fraction"]) == (2, 0.0)
    assert first.optimizer.grad_norm > 0
    assert second.loss_metrics["loss"] < first.loss_metrics["loss"]
