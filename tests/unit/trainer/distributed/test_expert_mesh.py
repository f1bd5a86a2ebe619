"""Experts that cannot be divided are refused by name, and those that get no token still have gradients."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from services.trainer.distributed.expert_mesh import ExpertMesh, answered
from services.trainer.model.backend import UnsupportedModelError
from tests.helpers.models.model_families import save_tiny
from tests.helpers.trainers.lone_rank import lone_group


@pytest.mark.parametrize(
    ("family", "size", "shards", "told"),
    [
        ("qwen3", 2, 1, "expert: experts of qwen3 cannot be divided, only those of olmoe, qwen3_moe; leave it 1"),
        ("olmoe", 3, 1, "expert: 3 does not divide num_experts 4 of .*; change it"),
        ("qwen3_moe", 2, 3, r"expert: \[4, .*\] numbers of .* cannot be divided over expert 2 x shard 3"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(tmp_path, family, size, shards, told):
    model = AutoModelForCausalLM.from_pretrained(save_tiny(family, tmp_path))
    with lone_group(0, size):
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("expert",))
        with pytest.raises(UnsupportedModelError, match=told):
            ExpertMesh(mesh, shards=mesh, num_shards=shards).divide(model)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_without_tokens_have_gradients_of_zero(tmp_path, implementation):
    """Which other processes wait for: of the weights, and of what they would have sent."""
    path = save_tiny("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation=implementation)
    experts = model.model.layers[0].mlp.experts
    nothing = torch.empty(0, 32, requires_grad=True)
    found = answered(experts, nothing, torch.empty(0, dtype=torch.int64))
    assert found.shape == nothing.shape
    found.sum().backward()
    assert nothing.grad is not None
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())
