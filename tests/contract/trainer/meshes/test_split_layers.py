"""Layers split within themselves (tensor parallel) against one process: log-probs, gradients, files, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from penstock.model.model_shape import read_shape
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
SPLIT = {"tensor": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"), "qwen2", is_tied=True)


@pytest.mark.grid
def test_copies_that_split_layers_train_as_one_process(model):
    """One of them has no work in some rounds."""
    one = alone(model)
    with two_processes(model, processes=4, parallel=SPLIT | {"replicate": 2}) as four:
        assert_trains_as_one(four, one)
        (packs,) = partition(random_trajectories(5, count=1), max_pack_tokens=64, shares=four.shares)
        assert None in packs
        totals = [
            one.forward_backward(next(pack for pack in packs if pack is not None)),
            four.forward_backward(*packs),
        ]
        assert totals[0].num_tokens == totals[1].num_tokens
        norms = [backend.optimizer_step(divisor=7).grad_norm for backend in (four, one)]
        # After a step: where the gradient was rounding, so was the step.
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize(
    ("family", "processes"),
    [
        pytest.param("olmoe", 2, marks=pytest.mark.grid),
        ("qwen3_moe", 4),
        *(pytest.param(family, 4, marks=pytest.mark.grid) for family in ("llama", "qwen2", "qwen3")),
    ],
)
def test_two_that_split_layers_and_two_shards_of_them_train_write_and_resume_as_one(tmp_path, family, processes):
    folder = made(tmp_path / "model", family, is_tied=family == "qwen3")
    one = alone(folder)
    with two_processes(folder, processes=processes, parallel=SPLIT) as many:
        assert len(many.shares) == processes // 2
        held_here = sum(parameter.to_local().numel() for parameter in many._local._learner.parameters.values())
        expected = read_shape(folder).split(2).num_params / (processes // 2)
        # Norms and routers are not split, nor are rows always even.
        assert expected == pytest.approx(held_here, rel=0.03)
        assert_trains_as_one(many, one)
        held = weights(many)
        assert_each_resumes_the_other(many, one, tmp_path)
        assert_bit_equal(load_file(tmp_path / "published"), held)


def test_a_checkpoint_continues_in_shards(model, tmp_path):
    (tmp_path / "saved").mkdir()
    with two_processes(model, parallel=SPLIT) as two:
        train(two, 1)
        two.save(tmp_path / "saved").result()
        held = weights(two)
        after = train(two, 2)
    assert_continues_in_shards(model, tmp_path / "saved", held=held, after=after)


def test_a_reference_and_recomputed_activations_are_split_too(model):
    changes = {"algorithm": {"name": "dapo", "kl_coefficient": 0.1}, "gradient_checkpointing": True}
    one = alone(model, **changes)
    with two_processes(model, parallel=SPLIT, **changes) as two:
        assert train(two, 1) == pytest.approx(train(one, 1), rel=1e-5, abs=1e-5)
        assert_stepped_alike(two, one)
        found, expected = (scores(backend, random_trajectories(9), "reference_logprobs") for backend in (two, one))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_in_bfloat16_their_products_differ_by_rounding(model):
    one = alone(model, dtype="bfloat16")
    with two_processes(model, parallel=SPLIT, dtype="bfloat16") as two:
        found, expected = (scores(backend, random_trajectories(9), "logprobs") for backend in (two, one))
        assert np.abs(found - expected).mean() < 0.02
        assert train(two, 1)["grad_norm"] == pytest.approx(train(one, 1)["grad_norm"], rel=0.05)


def test_a_loss_that_is_not_finite_is_refused_in_all_and_they_go_on(model):
    with two_processes(model, parallel=SPLIT) as two:
        assert_goes_on_after_a_loss_that_is_not_finite(two)
