"""A model cut into stages of layers against one process: log-probs, gradient norm, weights, files, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from services.trainer.batches.rank_partition import partition
from services.trainer.model.backend import BackendError, CheckpointMismatchError
from tests.helpers.trainers.equal_training import (
    assert_bit_equal,
    assert_continues_in_shards,
    assert_each_resumes_the_other,
    assert_equal,
    assert_goes_on_after_a_loss_that_is_not_finite,
    assert_trains_as_one,
    made,
    random_trajectories,
    train,
)
from tests.helpers.trainers.two_processes import alone, scores, two_processes, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
UNLIKE = {"pipeline": 2, "layers_per_stage": [1, 3]}
COMPANY = {"algorithm": {"name": "dapo", "kl_coefficient": 0.1}, "gradient_checkpointing": True}
"""A reference, and activations that are computed again."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"), "qwen2", is_tied=True)


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [
        ("qwen2", True),
        ("qwen3_moe", False),
        *(
            pytest.param(*each, marks=pytest.mark.grid)
            for each in (("olmoe", False), ("llama", False), ("llama", True), ("qwen3", True))
        ),
    ],
)
def test_stages_of_one_and_three_layers_train_as_one_process(tmp_path, family, is_tied):
    folder = made(tmp_path / "model", family, is_tied=is_tied)
    one = alone(folder)
    with two_processes(folder, parallel=UNLIKE) as two:
        assert_trains_as_one(two, one)


@pytest.mark.grid
def test_two_pipelines_of_two_stages_train_as_one_process(model):
    """One of them has no work in some rounds, and they divide packs into unlike numbers of microbatches."""
    one = alone(model)
    with two_processes(model, processes=4, parallel={"pipeline": 2, "replicate": 2}) as four:
        assert four.shares == (1.0, 1.0)
        assert_trains_as_one(four, one)
        (packs,) = partition(random_trajectories(5, count=1), max_pack_tokens=64, shares=four.shares)
        assert None in packs
        one.forward_backward(next(pack for pack in packs if pack is not None))
        four.forward_backward(*packs)
        norms = [backend.optimizer_step(divisor=7).grad_norm for backend in (four, one)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert_equal(weights(four), weights(one))


@pytest.mark.parametrize(
    ("family", "is_tied", "changes"),
    [("qwen3", True, COMPANY), pytest.param("qwen3_moe", False, {}, marks=pytest.mark.grid)],
    ids=["qwen3", "qwen3_moe"],
)
def test_stages_that_are_sharded_train_write_and_resume_as_one_process(tmp_path, family, is_tied, changes):
    """Their processes have packs of their own, of unlike numbers of microbatches."""
    folder = made(tmp_path / "model", family, is_tied=is_tied)
    one = alone(folder, **changes)
    with two_processes(folder, processes=4, parallel=UNLIKE | {"shard": 2}, **changes) as four:
        assert four.shares == (1.0, 1.0)
        sharded = four._local._learner.parameters["model.layers.0.self_attn.q_proj.weight"]
        assert sharded.to_local().numel() == sharded.numel() // 2
        assert_trains_as_one(four, one)
        held = weights(four)
        assert_each_resumes_the_other(four, one, tmp_path)
        assert_bit_equal(load_file(tmp_path / "published"), held)
        (packs,) = partition(random_trajectories(5, count=1), max_pack_tokens=64, shares=four.shares)
        assert None in packs
        one.forward_backward(next(pack for pack in packs if pack is not None))
        four.forward_backward(*packs)
        norms = [backend.optimizer_step(divisor=7).grad_norm for backend in (four, one)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.grid
def test_copies_of_sharded_stages_train_and_write_as_one_process(model, tmp_path):
    """Eight processes: `replicate`, `pipeline` and `shard` together; four packs at a time, of which some lack one."""
    one = alone(model, **COMPANY)
    parallel = {"replicate": 2, "pipeline": 2, "shard": 2}
    with two_processes(model, processes=8, parallel=parallel, **COMPANY) as eight:
        assert eight.shares == (1.0,) * 4
        assert_trains_as_one(eight, one)
        (packs,) = partition(random_trajectories(5, count=1), max_pack_tokens=64, shares=eight.shares)
        assert packs.count(None) == 3
        one.forward_backward(next(pack for pack in packs if pack is not None))
        eight.forward_backward(*packs)
        norms = [backend.optimizer_step(divisor=7).grad_norm for backend in (eight, one)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        assert_each_resumes_the_other(eight, one, tmp_path)


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.grid)])
def test_files_and_checkpoints_are_those_of_one_process(tmp_path, family):
    folder = made(tmp_path / "model", family, is_tied=family == "qwen2")
    one = alone(folder)
    with two_processes(folder, parallel=UNLIKE) as two:
        train(two, 1)
        train(one, 1)
        written = two.write_weights(tmp_path / "published_by_two").result()
        one_wrote = one.write_weights(tmp_path / "published_by_one").result()
        assert_equal(load_file(tmp_path / "published_by_two"), load_file(tmp_path / "published_by_one"))
        layouts = [[(each.name, each.dtype, each.shape) for each in found.tensors] for found in (written, one_wrote)]
        assert layouts[0] == layouts[1]
        held = weights(two)
        again, after = assert_each_resumes_the_other(two, one, tmp_path)
        assert again.tensors == written.tensors
    assert_continues_in_shards(folder, tmp_path / "of_many", held=held, after=after)


def test_a_reference_and_recomputed_activations_are_cut_too(model):
    one = alone(model, **COMPANY)
    with two_processes(model, parallel={"pipeline": 2}, **COMPANY) as two:
        for seed in (1, 2):
            assert train(two, seed) == pytest.approx(train(one, seed), rel=1e-5, abs=1e-5)
        found, expected = (scores(backend, random_trajectories(9), "reference_logprobs") for backend in (two, one))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert_equal(weights(two), weights(one))


def test_what_goes_wrong_in_one_stage_is_refused_in_all_and_they_go_on(model, tmp_path):
    (tmp_path / "saved").mkdir()
    # Only the second stage has layers of other shapes.
    other = alone(model)
    other.save(tmp_path / "saved").result()
    shard = next((tmp_path / "saved" / "resume").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes().replace(b"weights/model.layers.3.mlp", b"weights/model.layers.9.mlp"))
    with two_processes(model, parallel=UNLIKE) as two:
        before = weights(two)
        with pytest.raises(CheckpointMismatchError):
            two.load(tmp_path / "saved")
        assert_equal(weights(two), before)
        assert_goes_on_after_a_loss_that_is_not_finite(two)


def test_stages_that_the_model_cannot_have_are_refused(model):
    parallel = {"pipeline": 2, "layers_per_stage": [1, 4]}
    with (
        pytest.raises(BackendError, match=r"layers_per_stage: \[1, 4\] are 5 layers, and .* has 4"),
        two_processes(model, parallel=parallel),
    ):
        pass
