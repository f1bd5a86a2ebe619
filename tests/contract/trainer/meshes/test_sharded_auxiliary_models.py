"""Two processes against one where the policy has company: a critic, a refreshed reference, trajectory balance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.batches.packing import pack_trajectories
from services.trainer.model.backend import NonFiniteLossError
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import step_settings
from tests.helpers.trainers.equal_training import made
from tests.helpers.trainers.two_processes import alone, assert_close, config_of, scores, two_processes, weights
from tests.unit.trainer.builders import VOCAB_SIZE, build_sample, build_trajectory, save_tiny_qwen2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CASES = {
    "ppo": {"processes": (1.0, 2.0), "algorithm": {"name": "ppo", "kl_coefficient": 0.05}},
    "tba": {"algorithm": {"name": "tba", "kl_coefficient": 0.1}},
    # Its reference is read as groups come, and travels with the packs.
    "early reference": {"algorithm": {"name": "reinforce_plus_plus", "kl_coefficient": 0.1}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


def groups(seed):
    """Five groups of three, of unlike lengths."""
    rng = np.random.default_rng(seed)
    return [
        [
            build_sample(
                group_id=f"g{number}",
                index=index,
                num_tokens=(length := int(rng.integers(2, 20))),
                reward=float(rng.normal()),
                completion_token_ids=rng.integers(0, VOCAB_SIZE, length).astype(np.int32),
            )
            for index in range(3)
        ]
        for number in range(5)
    ]


def train(backend, model, seed, *, algorithm, **_):
    """A step as the loop takes it, groups two at a time; returns what was reported."""
    config = config_of(model, algorithm=algorithm)
    settings = step_settings(config, policy_version=0)
    step = TrainingStep(backend, replace(settings, max_pack_tokens=48))
    made = groups(seed)
    for first in range(0, len(made), 2):
        step.add_groups(made[first : first + 2])
    report = step.finish()
    return {**report.loss_metrics, "grad_norm": report.optimizer.grad_norm}


def scored(backend, quantity):
    rng = np.random.default_rng(7)
    return scores(backend, [build_trajectory(rng, num_prompt=3, num_completion=6) for _ in range(7)], quantity)


def log_ratios(backend):
    return scored(backend, "logprobs") - scored(backend, "reference_logprobs")


def assert_same_scores(found, expected, *, has_critic):
    np.testing.assert_allclose(log_ratios(found), log_ratios(expected), atol=1e-4)
    if has_critic:
        np.testing.assert_allclose(scored(found, "values"), scored(expected, "values"), atol=1e-4)
        assert np.abs(scored(expected, "values")).max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [pytest.param(case, id=name, marks=[pytest.mark.grid] * (name == "tba")) for name, case in CASES.items()],
)
def test_two_processes_train_auxiliary_models_as_one_and_each_reads_the_other_s_checkpoint(model, tmp_path, changes):
    has_critic = changes["algorithm"]["name"] == "ppo"
    one = alone(model, **changes)
    for name in ("of_one", "of_two"):
        (tmp_path / name).mkdir()
    with two_processes(model, **changes) as two:
        for seed in (1, 2):
            assert train(two, model, seed, **changes) == pytest.approx(train(one, model, seed, **changes), rel=1e-4)
        assert_same_scores(two, one, has_critic=has_critic)
        for backend in (one, two):
            backend.refresh_reference()
        assert np.abs(log_ratios(two)).max() < 1e-5
        assert train(two, model, 3, **changes) == pytest.approx(train(one, model, 3, **changes), rel=1e-4)
        one.save(tmp_path / "of_one").result()
        two.save(tmp_path / "of_two").result()
        for backend in (one, two):
            train(backend, model, 4, **changes)
        two.load(tmp_path / "of_one")
        one.load(tmp_path / "of_two")
        assert_same_scores(two, one, has_critic=has_critic)
        assert np.abs(log_ratios(two)).max() > 1e-4
        assert train(two, model, 5, **changes) == pytest.approx(train(one, model, 5, **changes), rel=1e-4)
        assert_close(weights(two), weights(one))
        if has_critic:
            assert_all_refuse_a_critic_s_loss_that_is_not_finite(two, model, changes)


@pytest.mark.parametrize(
    ("family", "lora", "processes", "parallel"),
    [
        ("qwen2", False, 2, {"pipeline": 2, "layers_per_stage": [1, 3]}),
        pytest.param(
            *("qwen2", False, 4, {"pipeline": 2, "layers_per_stage": [1, 3], "shard": 2}), marks=pytest.mark.grid
        ),
        pytest.param("qwen3_moe", False, 2, {"tensor": 2}, marks=pytest.mark.grid),
        pytest.param("qwen3_moe", False, 2, {"expert": 2}, marks=pytest.mark.grid),
        pytest.param("qwen3_moe", {"target_modules": ["q_proj"]}, 2, {"expert": 2}, marks=pytest.mark.grid),
    ],
)
def test_a_critic_is_divided_as_its_policy_is(tmp_path, family, lora, processes, parallel):
    folder = made(tmp_path / "model", family, is_tied=family == "qwen2")
    changes = CASES["ppo"] | {"processes": processes, "lora": lora}
    one = alone(folder, **changes)
    with two_processes(folder, parallel=parallel, **changes) as many:
        for seed in (1, 2):
            found, expected = (train(backend, folder, seed, **changes) for backend in (many, one))
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
            found, expected = (scored(backend, "values") for backend in (many, one))
            np.testing.assert_allclose(found, expected, atol=1e-5)
        assert np.abs(expected).max() > 1e-3
        mean_gradients = critic_moments(one)
        for name, backend in (("of_many", many), ("of_one", one)):
            (tmp_path / name).mkdir()
            backend.save(tmp_path / name).result()
            train(backend, folder, 3, **changes)
        one.load(tmp_path / "of_many")
        np.testing.assert_allclose(scored(one, "values"), expected, atol=1e-5)
        for name, moment in critic_moments(one).items():
            torch.testing.assert_close(
                moment, mean_gradients[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
        many.load(tmp_path / "of_one")
        np.testing.assert_allclose(scored(many, "values"), expected, atol=1e-5)
        found, expected = (train(backend, folder, 4, **changes) for backend in (many, one))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert_all_refuse_a_critic_s_loss_that_is_not_finite(many, folder, changes)


def critic_moments(one):
    """Means of a critic's gradients, by its parameters' names."""
    learner = one._critic.learner
    return {name: learner.optimizer.state[each]["exp_avg"].clone() for name, each in learner.parameters.items()}


def assert_all_refuse_a_critic_s_loss_that_is_not_finite(many, model, changes):
    """Of a pack that only the last has; all go on."""
    before = weights(many)
    trajectory = build_trajectory(np.random.default_rng(3), num_prompt=2, num_completion=4)
    blank = np.zeros(6, dtype=np.float32)
    (pack,) = pack_trajectories([replace(trajectory, values=blank, returns=blank + np.inf)], max_pack_tokens=48)
    with pytest.raises(NonFiniteLossError, match="critic"):
        many.forward_backward(*[None] * (len(many.shares) - 1), pack)
    many.discard_gradients()
    assert_close(weights(many), before)
    assert train(many, model, 6, **changes)["grad_norm"] > 0
