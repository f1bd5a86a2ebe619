"""The formulas of a trainer's memory and traffic against tensors that exist, and collectives that are called."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import TrainingMode, frozen_bytes, held_bytes, working_bytes
from penstock.model.training_traffic import gathered_bytes, reduced_bytes
from services.trainer.batches.packing import join
from services.trainer.run.memory_fit import with_adapter
from services.trainer.run_sections import LoraSection
from services.trainer.scorer.frozen_model import FrozenModel
from tests.helpers.models.model_families import save_tiny
from tests.helpers.tensor_memory import TensorMemory
from tests.helpers.trainers.lone_rank import one_of
from tests.unit.trainer.builders import build_trajectory
from tests.unit.trainer.distributed.test_rank_backend import build_backend
from tests.unit.trainer.model.test_architectures import EXACT

SETTINGS = [
    ("float32", False),
    ("bfloat16", True),
    pytest.param("float32", True, marks=pytest.mark.grid),
    pytest.param("bfloat16", False, marks=pytest.mark.grid),
]
"""Data type, and whether layers compute their activations again."""
WIDE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


INTERLEAVED = {"no_rope_layers": [1, 0, 1, 0], "layer_types": ["chunked_attention", "full_attention"] * 2}


def trained_backend(path, ranks=None, **settings):
    """A backend after its first step, which makes the moments."""
    backend = build_backend(path, ranks=ranks, **settings)
    train(backend, num_tokens=16)
    return backend


def train(backend, *, num_tokens):
    rng = np.random.default_rng(0)
    pack = join([build_trajectory(rng, num_prompt=1, num_completion=num_tokens - 1)], [0])
    backend.forward_backward(pack)
    backend.optimizer_step(divisor=1)


def measured(backend, *, num_tokens):
    parameters = list(backend._model.parameters())
    moments = chain.from_iterable(state.values() for state in backend._learner.optimizer.state.values())
    gradients = (each.grad for each in parameters if each.grad is not None)
    memory = TensorMemory(
        tensor.detach() for tensor in (*parameters, *gradients, *(each for each in moments if each.dim()))
    )
    with memory.counting():
        train(backend, num_tokens=num_tokens)
    return memory


def mode_of(backend, *, num_tokens, checkpoints_layers=False):
    return TrainingMode(
        num_shards=backend._ranks.num_ranks,
        pack_tokens=num_tokens,
        is_half=backend._dtype == torch.bfloat16,
        checkpoints_layers=checkpoints_layers,
    )


def whole_bytes(shape, mode):
    return held_bytes(shape, mode) + working_bytes(shape, mode)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints_layers", [False, pytest.param(True, marks=pytest.mark.grid)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.grid)])
@pytest.mark.parametrize("family", EXACT)
def test_every_family_needs_what_the_formula_says(tmp_path, family, dtype, checkpoints_layers):
    """At lengths where weights count most, and where activations do."""
    path = save_tiny(family, tmp_path, max_position_embeddings=512)
    backend = trained_backend(path, dtype=dtype, gradient_checkpointing=checkpoints_layers)
    shape = read_shape(path)
    for num_tokens in (32, 128, 512):
        memory = measured(backend, num_tokens=num_tokens)
        mode = mode_of(backend, num_tokens=num_tokens, checkpoints_layers=checkpoints_layers)
        assert held_bytes(shape, mode) == pytest.approx(memory.held_bytes, rel=1e-3)
        assert whole_bytes(shape, mode) == pytest.approx(memory.peak_bytes, rel=0.1), num_tokens


def test_a_mixture_with_dense_layers_between_needs_what_the_formula_says(tmp_path):
    """Llama 4's every second layer."""
    path = save_tiny("llama4_text", tmp_path, num_hidden_layers=4, interleave_moe_layer_step=2, **INTERLEAVED)
    backend = trained_backend(path)
    memory = measured(backend, num_tokens=128)
    shape = read_shape(path)
    assert shape.num_dense_layers == 2
    assert whole_bytes(shape, mode_of(backend, num_tokens=128)) == pytest.approx(memory.peak_bytes, rel=0.1)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def qwen3(request, tmp_path_factory):
    """Layers wide enough for weights to outweigh everything else, as in real models."""
    path = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(**WIDE | {"vocab_size": 2048}, tie_word_embeddings=request.param)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize(("dtype", "checkpoints_layers"), SETTINGS)
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.grid), 4])
@pytest.mark.parametrize("num_tokens", [32, 256])
def test_a_shard_needs_and_exchanges_what_the_formulas_say(qwen3, num_ranks, dtype, checkpoints_layers, num_tokens):
    with one_of(0, num_ranks) as ranks:
        backend = trained_backend(qwen3, ranks, dtype=dtype, gradient_checkpointing=checkpoints_layers)
        memory = measured(backend, num_tokens=num_tokens)
    shape, mode = read_shape(qwen3), mode_of(backend, num_tokens=num_tokens, checkpoints_layers=checkpoints_layers)
    assert held_bytes(shape, mode) == pytest.approx(memory.held_bytes, rel=0.01)
    assert whole_bytes(shape, mode) == pytest.approx(memory.peak_bytes, rel=0.1)
    assert memory.collectives["_allgather_base_"] == gathered_bytes(shape, mode, num_passes=1)
    assert memory.collectives["_reduce_scatter_base_"] == reduced_bytes(shape, mode, num_passes=1)


@pytest.mark.parametrize(("dtype", "checkpoints_layers"), SETTINGS)
def test_one_process_needs_what_the_formula_says(qwen3, dtype, checkpoints_layers):
    backend = trained_backend(qwen3, dtype=dtype, gradient_checkpointing=checkpoints_layers)
    memory = measured(backend, num_tokens=256)
    shape, mode = read_shape(qwen3), mode_of(backend, num_tokens=256, checkpoints_layers=checkpoints_layers)
    assert whole_bytes(shape, mode) == pytest.approx(memory.peak_bytes, rel=0.1)
    assert not memory.collectives


@pytest.mark.parametrize(("dtype", "checkpoints_layers"), SETTINGS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("num_chosen", "width"), [pytest.param(2, 64, marks=pytest.mark.grid), (4, 96)])
def test_experts_need_what_the_formula_says(tmp_path, num_chosen, width, num_ranks, dtype, checkpoints_layers):
    """At so many tokens that most of it are activations."""
    experts = {"num_experts": 8, "num_experts_per_tok": num_chosen, "moe_intermediate_size": width}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**WIDE, **experts)).bfloat16().save_pretrained(tmp_path)
    with one_of(0, num_ranks) as ranks:
        settings = {"dtype": dtype, "gradient_checkpointing": checkpoints_layers}
        backend = trained_backend(tmp_path, ranks if num_ranks > 1 else None, **settings)
        memory = measured(backend, num_tokens=768)
    shape, mode = read_shape(tmp_path), mode_of(backend, num_tokens=768, checkpoints_layers=checkpoints_layers)
    assert whole_bytes(shape, mode) == pytest.approx(memory.peak_bytes, rel=0.1)


@pytest.mark.parametrize(("dtype", "checkpoints_layers"), SETTINGS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("base", ["auto", "nf4"])
@pytest.mark.parametrize("qwen3", [True, pytest.param(False, marks=pytest.mark.grid)], indirect=True)
def test_an_adapter_needs_what_the_formula_says(qwen3, base, num_ranks, dtype, checkpoints_layers):
    lora = LoraSection(rank=8, base=base)
    settings = {"dtype": dtype, "gradient_checkpointing": checkpoints_layers, "lora": lora}
    with one_of(0, num_ranks) as ranks:
        backend = trained_backend(qwen3, ranks if num_ranks > 1 else None, **settings)
        memory = measured(backend, num_tokens=256)
    mode = mode_of(backend, num_tokens=256, checkpoints_layers=checkpoints_layers)
    shape = read_shape(qwen3)
    mode = with_adapter(replace(mode, has_adapter=True), lora, shape)
    assert held_bytes(shape, mode) == pytest.approx(memory.held_bytes, rel=0.01)
    assert whole_bytes(shape, mode) == pytest.approx(memory.peak_bytes, rel=0.1)


@pytest.mark.parametrize("num_tokens", [32, 512])
def test_a_scorer_needs_no_more_than_the_formula_says(qwen3, num_tokens):
    model, rng = FrozenModel(qwen3, dtype="bfloat16", device="cpu"), np.random.default_rng(0)
    memory = TensorMemory(model._model.parameters())
    pack = join([build_trajectory(rng, num_prompt=1, num_completion=num_tokens - 1)], [0])
    with memory.counting():
        model.logprobs(pack)
    needed = frozen_bytes(read_shape(qwen3), num_tokens)
    assert 0.85 * needed < memory.peak_bytes <= needed
