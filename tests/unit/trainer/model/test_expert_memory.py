"""The formulas of memory and traffic where experts are divided, against tensors that exist and what is exchanged."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import held_bytes
from penstock.model.training_traffic import exchanged_bytes, gathered_bytes, reduced_bytes
from services.trainer.distributed import expert_mesh
from services.trainer.run.memory_fit import with_adapter
from services.trainer.run_sections import LoraSection
from tests.helpers.trainers.lone_rank import one_of
from tests.unit.trainer.model.test_training_memory import (
    SETTINGS,
    WIDE,
    measured,
    mode_of,
    trained_backend,
    whole_bytes,
)

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


class Balanced(torch.autograd.Function):
    """An exchange with processes that have just the same tokens: each receives what it sends. Counts its bytes."""

    num_bytes = 0

    @staticmethod
    def forward(ctx, rows, num_received, num_sent):
        assert num_received == num_sent
        Balanced.num_bytes += rows.nbytes
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        Balanced.num_bytes += gradient.nbytes
        return gradient.clone(), None, None


@pytest.fixture
def counter():
    with (
        patch.object(expert_mesh, "all_to_all_single_autograd", lambda *args: Balanced.apply(*args[:3])),
        patch.object(expert_mesh.dist, "all_to_all_single", lambda received, sent, **_: received.copy_(sent)),
    ):
        Balanced.num_bytes = 0
        yield Balanced


@pytest.mark.parametrize(("dtype", "checkpoints_layers"), SETTINGS)
@pytest.mark.parametrize(("num_ranks", "size"), [(4, 2), pytest.param(4, 4, marks=pytest.mark.grid)])
def test_a_process_needs_and_exchanges_what_the_formulas_say(
    tmp_path, counter, num_ranks, size, dtype, checkpoints_layers
):
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**WIDE, **EXPERTS)).bfloat16().save_pretrained(tmp_path)
    with one_of(0, num_ranks, expert_size=size) as ranks:
        backend = trained_backend(tmp_path, ranks, dtype=dtype, gradient_checkpointing=checkpoints_layers)
        before = counter.num_bytes
        memory = measured(backend, num_tokens=768)
    mode = mode_of(backend, num_tokens=768, checkpoints_layers=checkpoints_layers)
    shape, mode = read_shape(tmp_path), replace(mode, num_expert_shards=size)
    assert counter.num_bytes - before == exchanged_bytes(shape, mode, num_tokens=768)
    assert memory.collectives["_allgather_base_"] == gathered_bytes(shape, mode, num_passes=1)
    assert memory.collectives["_reduce_scatter_base_"] == reduced_bytes(shape, mode, num_passes=1)
    assert whole_bytes(shape, mode) == pytest.approx(memory.peak_bytes, rel=0.1)


@pytest.mark.parametrize(("dtype", "checkpoints_layers"), SETTINGS)
@pytest.mark.parametrize("num_tokens", [pytest.param(256, marks=pytest.mark.grid), 768])
def test_an_adapter_over_divided_experts_needs_what_the_formula_says(
    tmp_path, counter, num_tokens, dtype, checkpoints_layers
):
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**WIDE, **EXPERTS)).bfloat16().save_pretrained(tmp_path)
    lora = LoraSection(rank=8, target_modules=("q_proj", "v_proj"))
    settings = {"dtype": dtype, "gradient_checkpointing": checkpoints_layers, "lora": lora}
    with one_of(0, 4, expert_size=2) as ranks:
        backend = trained_backend(tmp_path, ranks, **settings)
        memory = measured(backend, num_tokens=num_tokens)
    shape, mode = read_shape(tmp_path), mode_of(backend, num_tokens=num_tokens, checkpoints_layers=checkpoints_layers)
    mode = with_adapter(replace(mode, has_adapter=True, num_expert_shards=2), lora, shape)
    assert held_bytes(shape, mode) == pytest.approx(memory.held_bytes, rel=0.01)
    assert whole_bytes(shape, mode) == pytest.approx(memory.peak_bytes, rel=0.1)
