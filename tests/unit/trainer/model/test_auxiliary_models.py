"""A critic and a reference beside the policy: learning, refreshing, resuming."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from services.trainer.algorithms.loss import LossSettings, policy_loss
from services.trainer.algorithms.ppo import PPO
from services.trainer.batches.packing import pack_trajectories
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.model.backend import BackendError, CheckpointMismatchError
from services.trainer.model.model_loading import ModelSettings
from services.trainer.run_sections import OptimizerConfig
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import StepSettings
from tests.unit.trainer.builders import VOCAB_SIZE, build_sample, build_trajectory, save_tiny_qwen2, scores_of


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


def build_backend(directory, **model):
    return RankBackend(
        model=ModelSettings(path=directory, **({"critic_learning_rate": 1e-2} | model)),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        loss=partial(policy_loss, algorithm=PPO, settings=LossSettings(clip=PPO.clip)),
        seed=0,
    )


def groups(seed):
    """A completion's first token says whether it is rewarded: what a critic can foresee."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(4):
        group = []
        for index in range(4):
            tokens = rng.integers(0, VOCAB_SIZE, 5).astype(np.int32)
            tokens[0] = 10 + rng.integers(0, 2)
            reward = float(tokens[0] == 11)
            sample = build_sample(group_id=f"g{number}", index=index, num_tokens=5, reward=reward)
            group.append(replace(sample, completion_token_ids=tokens))
        made.append(group)
    return made


def take_step(backend, seed):
    step = TrainingStep(
        backend,
        StepSettings(
            policy_version=0,
            max_staleness=0,
            max_pack_tokens=60,
            algorithm=PPO,
            normalization=PPO.normalization,
            skip_zero_advantages=False,
        ),
    )
    step.add_groups(groups(seed))
    return step.finish()


def only_pack(seed=0):
    rng = np.random.default_rng(seed)
    trajectories = [build_trajectory(rng, num_prompt=3, num_completion=6) for _ in range(3)]
    (pack,) = pack_trajectories(trajectories, max_pack_tokens=1000)
    return pack


def values(backend):
    return scores_of(backend, only_pack(), "values")


def test_a_new_critic_expects_nothing_and_learns_what_is_worth_something(model_directory):
    backend = build_backend(model_directory)
    assert not values(backend).any()
    reports = [take_step(backend, seed) for seed in range(30)]
    losses = [report.loss_metrics["value_loss"] for report in reports]
    assert losses[-1] < 0.5 * losses[0]
    # It has foreseen the reward from the first token on.
    good, bad = (build_trajectory(np.random.default_rng(1), num_prompt=3, num_completion=4) for _ in range(2))
    for trajectory, token in ((good, 11), (bad, 10)):
        trajectory.token_ids[:4] = [1, 2, 3, token]
    scores = [
        scores_of(backend, pack, "values")[-1]
        for trajectory in (good, bad)
        for pack in pack_trajectories([trajectory], max_pack_tokens=64)
    ]
    assert scores[0] > scores[1] + 0.3


def test_values_do_not_depend_on_neighbours_in_a_row(model_directory):
    backend = build_backend(model_directory)
    for seed in range(3):
        take_step(backend, seed)
    trajectory = build_trajectory(np.random.default_rng(2), num_prompt=3, num_completion=6)
    found = []
    for count in (1, 3):
        pack = pack_trajectories([trajectory] * count, max_pack_tokens=1000)[0]
        found.append(scores_of(backend, pack, "values")[-6:])
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_policy_and_critic_resume_bit_for_bit(tmp_path, model_directory, steps_before):
    original, resumed = (build_backend(model_directory) for _ in range(2))
    for seed in range(steps_before):
        take_step(original, seed)
    original.save(tmp_path).result()
    take_step(resumed, 99)
    resumed.load(tmp_path)
    for seed in (10, 11):
        assert take_step(resumed, seed) == take_step(original, seed)
    np.testing.assert_array_equal(values(resumed), values(original))
    assert values(resumed).any()


def test_a_checkpoint_without_a_critic_is_refused_where_one_is_wanted(tmp_path, model_directory):
    build_backend(model_directory, critic_learning_rate=None).save(tmp_path).result()
    backend = build_backend(model_directory)
    with pytest.raises(CheckpointMismatchError, match="critic"):
        backend.load(tmp_path)


def test_a_critic_that_was_saved_is_left_out_where_none_is_wanted(tmp_path, model_directory):
    original = build_backend(model_directory)
    take_step(original, 0)
    original.save(tmp_path).result()
    resumed = build_backend(model_directory, critic_learning_rate=None)
    resumed.load(tmp_path)
    for name, tensor in original.state_tensors().items():
        assert torch.equal(resumed.state_tensors()[name], tensor)


def test_a_refreshed_reference_is_refused_where_none_is_kept(tmp_path, model_directory):
    original = build_backend(model_directory, keep_reference=True)
    original.refresh_reference()
    original.save(tmp_path).result()
    with pytest.raises(CheckpointMismatchError, match="reference"):
        build_backend(model_directory).load(tmp_path)


def test_a_reference_of_the_former_format_is_not_lost_silently(tmp_path, model_directory):
    original = build_backend(model_directory, keep_reference=True)
    original.save(tmp_path).result()
    (tmp_path / "companions").mkdir()
    with pytest.raises(CheckpointMismatchError, match="companions/, which this version does not read"):
        original.load(tmp_path)


def log_ratios(backend):
    return scores_of(backend, only_pack()) - scores_of(backend, only_pack(), "reference_logprobs")


def test_a_refreshed_reference_is_the_policy_of_that_moment_also_after_resuming(tmp_path, model_directory):
    backend = build_backend(model_directory, keep_reference=True)
    assert not log_ratios(backend).any()
    take_step(backend, 0)
    before = log_ratios(backend)
    assert np.abs(before).max() > 1e-3
    backend.refresh_reference()
    assert not log_ratios(backend).any()
    take_step(backend, 1)
    backend.save(tmp_path).result()
    resumed = build_backend(model_directory, keep_reference=True)
    resumed.load(tmp_path)
    np.testing.assert_array_equal(log_ratios(resumed), log_ratios(backend))
    assert np.abs(log_ratios(resumed)).max() > 1e-4


def test_a_critic_that_goes_astray_ends_the_step_with_nothing_changed(model_directory):
    backend = build_backend(model_directory)
    with torch.no_grad():
        backend._critic._head.bias.fill_(float("nan"))
    weights = {name: tensor.clone() for name, tensor in backend.state_tensors().items()}
    with pytest.raises(BackendError, match="the loss"):
        take_step(backend, 0)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in backend.state_tensors().items())


def test_a_critic_computes_its_activations_again_as_the_policy_does(model_directory):
    backend = build_backend(model_directory, gradient_checkpointing=True)
    norms = [network.layers[0].input_layernorm for network in (backend._model.base_model, backend._critic._network)]
    calls = []
    for norm in norms:
        norm.register_forward_hook(lambda module, *_: calls.append(module))
    backend.forward_backward(replace(only_pack(), values=np.zeros(18, np.float32), returns=np.ones(18, np.float32)))
    assert [calls.count(norm) for norm in norms] == [2, 2]
