"""Layers that cannot be split are refused by name, before a process reads its part of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from services.trainer.distributed.split_layers import DIMENSION, SplitLayers
from services.trainer.model.backend import UnsupportedModelError
from tests.helpers.models.model_families import save_tiny


def split_with_adapter(layers, model):
    layers.split(model)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["o_proj"]), model, low_cpu_mem_usage=True)
    layers.split_adapter(model)


@pytest.mark.parametrize(
    ("family", "changes", "splits", "shards", "told"),
    [
        ("qwen2", {"intermediate_size": 49}, 2, 1, "tensor: 2 does not divide intermediate_size 49 of .*; change it"),
        ("qwen2", {}, 4, 1, "tensor: 4 does not divide num_key_value_heads 2 of"),
        ("qwen3_moe", {"num_experts": 3}, 2, 1, "tensor: 2 does not divide num_experts 3 of"),
        ("qwen3_moe", {}, 2, 3, r"tensor: \[4, .*\] numbers of .* cannot be divided over tensor 2 x shard 3"),
        ("llama", {"attention_bias": True}, 2, 1, "tensor: self_attn.o_proj of .* has a bias"),
        # Of an adapter of rank 2.
        ("qwen2", {}, 2, 3, r"tensor: \[2, 32\] numbers of weight cannot be divided over tensor 2 x shard 3"),
        ("gpt2", {}, 2, 1, "tensor: layers of gpt2 cannot be split, only those of llama"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path, family, changes, splits, shards, told):
    model = AutoModelForCausalLM.from_pretrained(save_tiny(family, tmp_path, **changes))
    dist.init_process_group("fake", rank=0, world_size=splits, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (splits,), mesh_dim_names=(DIMENSION,))
        with pytest.raises(UnsupportedModelError, match=told):
            split_with_adapter(SplitLayers(mesh, num_shards=shards), model)
    finally:
        dist.destroy_process_group()
