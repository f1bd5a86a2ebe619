"""Experts divided over processes that each have their own tokens, against one process: log-probs, gradients, files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from services.trainer.batches.rank_partition import partition
from tests.helpers.trainers.equal_training import (
    assert_bit_equal,
    assert_continues_in_shards,
    assert_each_resumes_the_other,
    assert_goes_on_after_a_loss_that_is_not_finite,
    assert_stepped_alike,
    assert_trains_as_one,
    made,
    random_trajectories,
    train,
)
from tests.helpers.trainers.two_processes import alone, scores, two_processes, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("family", "processes", "parallel"),
    [
        pytest.param("qwen3_moe", 2, {"expert": 2}, marks=pytest.mark.grid),
        pytest.param("olmoe", 4, {"expert": 4}, marks=pytest.mark.grid),
        pytest.param("olmoe", 4, {"expert": 2}, marks=pytest.mark.grid),
        ("qwen3_moe", 4, {"expert": 2, "replicate": 2}),
    ],
)
def test_processes_that_divide_experts_train_write_and_resume_as_one(tmp_path, family, processes, parallel):
    """In some rounds only one of them has work."""
    folder = made(tmp_path / "model", family, is_tied=False)
    one = alone(folder)
    with two_processes(folder, processes=processes, parallel=parallel) as many:
        shards = processes // parallel.get("replicate", 1)
        assert share_of_experts(many) == 1 / shards
        assert_trains_as_one(many, one)
        held = weights(many)
        assert_each_resumes_the_other(many, one, tmp_path)
        assert_bit_equal(load_file(tmp_path / "published"), held)
        (packs,) = partition(random_trajectories(5, count=1), max_pack_tokens=64, shares=many.shares)
        assert packs.count(None) == processes - 1
        one.forward_backward(next(pack for pack in packs if pack is not None))
        many.forward_backward(*packs)
        norms = [backend.optimizer_step(divisor=7).grad_norm for backend in (many, one)]
        # After a step: where the gradient was rounding, so was the step.
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def share_of_experts(backend):
    """Of a layer, those that this process holds."""
    parameter = backend._local._learner.parameters["model.layers.0.mlp.experts.down_proj"]
    assert isinstance(parameter, DTensor)
    return parameter.to_local().numel() / parameter.numel()


def test_a_process_whose_experts_get_no_token_takes_part(tmp_path):
    """In all passes: of a reference, and of layers that compute their activations again."""
    folder = made(tmp_path / "model", "qwen3_moe", is_tied=False, num_experts_per_tok=1)
    leave_to_the_first_half(folder)
    changes = {"algorithm": {"name": "dapo", "kl_coefficient": 0.1}, "gradient_checkpointing": True}
    one = alone(folder, **changes)
    with two_processes(folder, parallel={"expert": 2}, **changes) as two:
        found, expected = (train(backend, 1) for backend in (two, one))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
        moments = one._learner.optimizer.state[one._learner.parameters["model.layers.2.mlp.experts.down_proj"]]
        assert [bool(each.any()) for each in moments["exp_avg"].chunk(2)] == [True, False]
        assert_stepped_alike(two, one)
        found, expected = (scores(backend, random_trajectories(9), "reference_logprobs") for backend in (two, one))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert_goes_on_after_a_loss_that_is_not_finite(two)
        (tmp_path / "saved").mkdir()
        two.save(tmp_path / "saved").result()
        held = weights(two)
        after = train(two, 2)
    assert_continues_in_shards(folder, tmp_path / "saved", held=held, after=after, **changes)


def leave_to_the_first_half(folder):
    """Of two experts alone, which are the first: the others' logits are those two's mean, never the greatest."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            rows = layer.mlp.gate.weight
            assert len(rows) == 4
            rows[2:] = rows[:2].mean(0)
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    "lora",
    [False, pytest.param({"target_modules": ["q_proj", "o_proj"]}, marks=pytest.mark.grid)],
    ids=["all weights", "an adapter"],
)
def test_in_bfloat16_their_products_differ_by_rounding(tmp_path, lora):
    folder = made(tmp_path / "model", "qwen3_moe", is_tied=False)
    changes = {"dtype": "bfloat16", "lora": lora}
    one = alone(folder, **changes)
    with two_processes(folder, parallel={"expert": 2}, **changes) as two:
        found, expected = (scores(backend, random_trajectories(9), "logprobs") for backend in (two, one))
        assert np.abs(found - expected).mean() < 0.02
        assert train(two, 1)["grad_norm"] == pytest.approx(train(one, 1)["grad_norm"], rel=0.05)
