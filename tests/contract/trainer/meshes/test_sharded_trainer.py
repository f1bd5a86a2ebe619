"""Two processes that train one model (FSDP2) against one: losses, gradients, weights, checkpoints. Over gloo, and over
NCCL where there are two GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.trainer.batches.rank_partition import partition
from services.trainer.model.backend import CheckpointMismatchError, NonFiniteLossError
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import step_settings
from tests.helpers.trainers.equal_training import random_trajectories, train
from tests.helpers.trainers.two_processes import alone, assert_close, config_of, scores, two_processes, weights
from tests.unit.trainer.builders import build_group, save_tiny_qwen2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


def train_in_minibatches(backend):
    """Three optimiser steps on one batch, anchored to the weights before the first."""
    config = config_of(Path("model"))
    settings = step_settings(config, policy_version=0)
    step = TrainingStep(backend, replace(settings, max_pack_tokens=48, num_minibatches=3))
    for number, name in enumerate("abcdefg"):
        step.add_groups([build_group(name, [0.0, 1.0, 1.0], num_tokens=3 + number)])
    report = step.finish()
    return {**report.loss_metrics, "grad_norm": report.optimizer.grad_norm}


CASES = {
    "all weights, unlike shares, a reference": {
        "processes": (1.0, 2.0),
        "algorithm": {"name": "dapo", "kl_coefficient": 0.1},
    },
    "two copies of the model": {"parallel": {"replicate": 2}},
    "an adapter, activations computed again": {"lora": True, "gradient_checkpointing": True},
}


ON_TWO_GPUS = (
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each of two processes"),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_TWO_GPUS)])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_two_processes_train_as_one_and_each_reads_the_other_s_checkpoint(model, tmp_path, changes, device):
    changes = {**changes, "device": device}
    one = alone(model, **changes)
    for name in ("of_one", "of_two"):
        (tmp_path / name).mkdir()
    with two_processes(model, **changes) as two:
        assert_close(weights(two), weights(one))
        # Of a number that leaves one of them without work in some round.
        found, expected = (scores(backend, random_trajectories(9), "logprobs") for backend in (two, one))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        for seed in (1, 2):
            assert train(two, seed) == pytest.approx(train(one, seed), rel=1e-4, abs=1e-5)
        assert train_in_minibatches(two) == pytest.approx(train_in_minibatches(one), rel=1e-4, abs=1e-5)
        assert_close(weights(two), weights(one))
        one.save(tmp_path / "of_one").result()
        written = two.save(tmp_path / "of_two")
        # Training goes on while both processes write.
        assert train(two, 3) == pytest.approx(train(one, 3), rel=1e-4, abs=1e-5)
        written.result()
        two.load(tmp_path / "of_one")
        one.load(tmp_path / "of_two")
        for seed in (3, 4):
            assert train(two, seed) == pytest.approx(train(one, seed), rel=1e-4, abs=1e-5)
        assert_close(weights(two), weights(one))
        assert_refuses_what_goes_wrong_in_one_process(two, tmp_path)


def test_two_copies_of_two_shards_train_as_one(model, tmp_path):
    changes = {"processes": 4, "parallel": {"replicate": 2, "shard": 2}}
    one = alone(model)
    with two_processes(model, **changes) as four:
        for seed in (1, 2):
            assert train(four, seed) == pytest.approx(train(one, seed), rel=1e-5, abs=1e-5)
        assert_close(weights(four), weights(one))
        (tmp_path / "of_four").mkdir()
        four.write_weights(tmp_path / "published.safetensors").result()
        four.save(tmp_path / "of_four").result()
        published = load_file(tmp_path / "published.safetensors")
        assert_close(published, weights(one))
        one.load(tmp_path / "of_four")
        assert train(four, 3) == pytest.approx(train(one, 3), rel=1e-5, abs=1e-5)


def test_in_bfloat16_two_processes_compute_as_one(model, tmp_path):
    AutoModelForCausalLM.from_pretrained(model).bfloat16().save_pretrained(tmp_path)
    changes = {"dtype": "bfloat16", "algorithm": {"name": "dapo", "kl_coefficient": 0.1}}
    one = alone(tmp_path, **changes)
    with two_processes(tmp_path, **changes) as two:
        for quantity in ("logprobs", "reference_logprobs"):
            found, expected = (scores(backend, random_trajectories(9), quantity) for backend in (two, one))
            np.testing.assert_allclose(found, expected, atol=1e-5)
        # Before the first step the policy is its reference, to the last bit.
        np.testing.assert_array_equal(found, scores(two, random_trajectories(9), "logprobs"))
        # From then on weights are rounded where they are gathered that one process reads whole: embedding and norms.
        for seed in (1, 2):
            assert train(two, seed) == pytest.approx(train(one, seed), rel=0.03, abs=0.01)


def assert_refuses_what_goes_wrong_in_one_process(two, folder):
    """Both processes refuse it, nothing has changed, and both go on."""
    before = weights(two)
    (folder / "saved").mkdir()
    alone(save_tiny_qwen2(folder / "other", intermediate_size=64)).save(folder / "saved").result()
    with pytest.raises(CheckpointMismatchError):
        two.load(folder / "saved")
    poisoned = random_trajectories(1, count=2)
    poisoned[1].advantages[:] = np.nan
    (packs,) = partition(poisoned, max_pack_tokens=64, shares=(1.0, 1.0))
    assert all(pack is not None for pack in packs)
    with pytest.raises(NonFiniteLossError):
        two.forward_backward(*packs)
    two.discard_gradients()
    assert_close(weights(two), before)
    assert train(two, 5)["grad_norm"] > 0
