"""A model cut into stages of layers against one process: log-probs, gradient norm, weights, files, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.batches.rank_partition import partition
from services.trainer.model.backend import BackendError, CheckpointMismatchError, NonFiniteLossError
from tests.contract.trainer.test_sharded_trainer import random_trajectories, train
from tests.helpers.models.model_families import FAMILIES
from tests.helpers.trainers.two_processes import alone, scores, two_processes, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
UNLIKE = {"pipeline": 2, "layers_per_stage": [1, 3]}
STEADY_MOMENT = 1e-7
"""A tenth of a gradient of a hundred times AdamW's epsilon."""
_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def made(folder, family, *, is_tied):
    torch.manual_seed(3)
    settings = _COMMON | FAMILIES[family] | {"tie_word_embeddings": is_tied}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"stands": "in"}', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"), "qwen2", is_tied=True)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def assert_trains_as_one(many, one):
    assert_equal(weights(many), weights(one))
    found, expected = (scores(backend, random_trajectories(9), "logprobs") for backend in (many, one))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert train(many, 1) == pytest.approx(train(one, 1), rel=1e-5, abs=1e-5)
    assert_stepped_alike(many, one)


def assert_stepped_alike(many, one):
    """AdamW's first step is nearly the gradient's sign: where the gradient is rounding, so is the step."""
    found, expected = weights(many), weights(one)
    shares = []
    for name, parameter in one._learner.parameters.items():
        moment = one._learner.optimizer.state[parameter]["exp_avg"].abs()
        is_steady = (moment > STEADY_MOMENT) | (moment == 0.0)
        shares.append(is_steady.flatten())
        found[name] = torch.where(is_steady, found[name], expected[name])
    assert torch.cat(shares).float().mean() > 0.99
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [("llama", False), ("qwen2", True), ("qwen3", True), ("qwen3_moe", False)],
)
def test_stages_of_one_and_three_layers_train_as_one_process(tmp_path, family, is_tied):
    folder = made(tmp_path / "model", family, is_tied=is_tied)
    one = alone(folder)
    with two_processes(folder, parallel=UNLIKE) as two:
        assert_trains_as_one(two, one)


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


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_files_and_checkpoints_are_those_of_one_process(tmp_path, family):
    folder = made(tmp_path / "model", family, is_tied=family == "qwen2")
    for name in ("of_stages", "of_one"):
        (tmp_path / name).mkdir()
    one = alone(folder)
    with two_processes(folder, parallel=UNLIKE) as two:
        train(two, 1)
        train(one, 1)
        written = two.write_weights(tmp_path / "published").result()
        one_wrote = one.write_weights(tmp_path / "published_by_one").result()
        assert_equal(load_file(tmp_path / "published"), load_file(tmp_path / "published_by_one"))
        layouts = [[(each.name, each.dtype, each.shape) for each in found.tensors] for found in (written, one_wrote)]
        assert layouts[0] == layouts[1]
        two.save(tmp_path / "of_stages").result()
        held = weights(two)
        AutoModelForCausalLM.from_pretrained(tmp_path / "of_stages")
        # Exactly: one process holds the same bits, and so do the stages that resume from its checkpoint.
        one.load(tmp_path / "of_stages")
        assert one.write_weights(tmp_path / "by_one").result().tensors == written.tensors
        one.save(tmp_path / "of_one").result()
        train(two, 2)
        two.load(tmp_path / "of_one")
        assert two.write_weights(tmp_path / "again").result().tensors == written.tensors
        after = train(two, 2)
        assert after == pytest.approx(train(one, 2), rel=1e-5, abs=1e-5)
    with two_processes(folder) as shards:
        shards.load(tmp_path / "of_stages")
        resumed = weights(shards)
        assert all(torch.equal(resumed[name], held[name]) for name in held)
        assert train(shards, 2) == pytest.approx(after, rel=1e-5, abs=1e-5)


def test_a_reference_and_recomputed_activations_are_cut_too(model):
    changes = {"algorithm": {"name": "dapo", "kl_coefficient": 0.1}, "gradient_checkpointing": True}
    one = alone(model, **changes)
    with two_processes(model, parallel={"pipeline": 2}, **changes) as two:
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
        poisoned = random_trajectories(1, count=2)
        poisoned[1].advantages[:] = np.nan
        ((pack,),) = partition(poisoned, max_pack_tokens=64, shares=two.shares)
        with pytest.raises(NonFiniteLossError):
            two.forward_backward(pack)
        two.discard_gradients()
        assert_equal(weights(two), before)
        assert train(two, 5)["grad_norm"] > 0


def test_stages_that_the_model_cannot_have_are_refused(model):
    parallel = {"pipeline": 2, "layers_per_stage": [1, 4]}
    with pytest.raises(BackendError, match=r"layers_per_stage: \[1, 4\] are 5 layers, and .* has 4"):
        two_processes(model, parallel=parallel).__enter__()
