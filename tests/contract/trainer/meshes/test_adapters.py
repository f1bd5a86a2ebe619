"""An adapter over a base cut into stages, or whose layers are split, against one process: what is trained and written.

Shards and islands: `test_sharded_trainer`, `test_islands`, `test_writing_together`.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from tests.helpers.trainers.equal_training import (
    assert_bit_equal,
    assert_goes_on_after_a_loss_that_is_not_finite,
    assert_trains_as_one,
    made,
    random_trajectories,
    train,
)
from tests.helpers.trainers.two_processes import alone, scores, two_processes, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MIXTURES = ("olmoe", "qwen3_moe")
REFERENCE = {"algorithm": {"name": "dapo", "kl_coefficient": 0.1}}


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen2", {"pipeline": 2, "layers_per_stage": [1, 3]}),
        pytest.param("qwen2", {"pipeline": 2, "layers_per_stage": [1, 3], "shard": 2}, marks=pytest.mark.grid),
        pytest.param("qwen3_moe", {"pipeline": 2, "replicate": 2}, marks=pytest.mark.grid),
        pytest.param("qwen3_moe", {"tensor": 2}, marks=pytest.mark.grid),
        pytest.param("qwen2", {"tensor": 2, "shard": 2}, marks=pytest.mark.grid),
        pytest.param("olmoe", {"expert": 2, "shard": 4}, marks=pytest.mark.grid),
        pytest.param("qwen3_moe", {"expert": 2, "shard": 2, "replicate": 2}, marks=pytest.mark.grid),
        ("qwen3_moe", {"expert": 2, "shard": 2}),
    ],
    ids=str,
)
def test_all_meshes_train_an_adapter_as_one_process(tmp_path, family, parallel):
    folder = made(tmp_path / "model", family, is_tied=family == "qwen2")
    processes = prod(parallel.get(name, 1) for name in ("replicate", "shard", "pipeline", "tensor"))
    # Activations are computed again, and the reference is the base.
    lora = {"target_modules": ["q_proj", "v_proj", "o_proj"]} if family in MIXTURES else True
    changes = {"lora": lora, "gradient_checkpointing": True, **REFERENCE}
    one = alone(folder, **changes)
    with two_processes(folder, processes=processes, parallel=parallel, **changes) as many:
        assert many.adapter == one.adapter
        assert_trains_as_one(many, one)
        found, expected = (scores(backend, random_trajectories(9), "reference_logprobs") for backend in (many, one))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert_writes_and_resumes_as_one(many, one, tmp_path)
        if processes == 2:
            assert_goes_on_after_a_loss_that_is_not_finite(many)


@pytest.mark.parametrize(
    ("family", "processes", "parallel"),
    [
        pytest.param("qwen2", 4, {"pipeline": 2, "shard": 2}, marks=pytest.mark.grid),
        pytest.param("qwen2", 3, {"islands": [2, 1]}, marks=pytest.mark.grid),
        ("qwen2", 2, {"tensor": 2}),
        pytest.param("qwen2", 4, {"tensor": 2, "shard": 2}, marks=pytest.mark.grid),
        pytest.param("qwen3_moe", 2, {"expert": 2}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_over_a_base_of_4_bits_they_train_as_one_process(tmp_path, family, processes, parallel):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    folder = made(tmp_path / "model", family, is_tied=True, **sizes)
    lora = {"target_modules": ["q_proj", "v_proj", "o_proj"]} if family in MIXTURES else {}
    changes = {"lora": lora | {"base": "nf4"}, "gradient_checkpointing": True}
    one = alone(folder, **changes)
    # The base is another one, if only a little.
    rounded, exact = (
        scores(each, random_trajectories(9), "logprobs") for each in (one, alone(folder, lora=lora or True))
    )
    assert 1e-3 < np.abs(rounded - exact).mean() < 1
    with two_processes(folder, processes=processes, parallel=parallel, **changes) as many:
        assert_trains_as_one(many, one)
        assert_writes_and_resumes_as_one(many, one, tmp_path)


def assert_writes_and_resumes_as_one(many, one, folder):
    """Each holds the bits of the other's checkpoint, and publishes the same bytes."""
    for name in ("of_many", "of_one"):
        (folder / name).mkdir()
    written = many.write_weights(folder / "published").result()
    many.save(folder / "of_many").result()
    one.load(folder / "of_many")
    assert_bit_equal(weights(one), weights(many))
    assert one.write_weights(folder / "by_one").result().tensors == written.tensors
    assert (folder / "by_one").read_bytes() == (folder / "published").read_bytes()
    one.save(folder / "of_one").result()
    files = [(folder / name / "adapter_model.safetensors").read_bytes() for name in ("of_one", "of_many")]
    assert files[0] == files[1]
    train(many, 2)
    many.load(folder / "of_one")
    assert many.write_weights(folder / "again").result().tensors == written.tensors
    assert train(many, 2) == pytest.approx(train(one, 2), rel=1e-5, abs=1e-5)
