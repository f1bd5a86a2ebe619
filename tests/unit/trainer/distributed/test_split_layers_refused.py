"""Layers that cannot be split are refused by name, before a process reads its part of them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from services.trainer.distributed.split_layers import DIMENSION, SplitLayers
from services.trainer.model.adapters.injection import Injection
from services.trainer.model.adapters.nf4 import own_columns, pack, unpack
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.ranks import Ranks
from services.trainer.run_sections import LoraSection
from tests.helpers.models.model_families import save_tiny
from tests.helpers.trainers.lone_rank import lone_group


class Splitting(Ranks):
    """Of a process that splits layers, what an adapter asks."""

    def __init__(self, layers):
        self.split_adapter = layers.split_adapter


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
    with lone_group(0, splits):
        mesh = init_device_mesh("cpu", (splits,), mesh_dim_names=(DIMENSION,))
        with pytest.raises(UnsupportedModelError, match=told):
            split_with_adapter(SplitLayers(mesh, num_shards=shards), model)


def test_a_base_of_4_bits_is_split_between_blocks_alone(tmp_path):
    """Of 128 inputs of o_proj each process has one block; of 64 neither has a whole one."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    for head_dim in (32, 16):
        save_tiny("qwen3", tmp_path / str(head_dim), head_dim=head_dim, **sizes)
    with lone_group(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(DIMENSION,))
        wide, whole = with_packed_base(tmp_path / "32", mesh)
        assert wide.packed.to_local().shape == (64, 32 + 1 + 8)
        with pytest.raises(UnsupportedModelError, match="o_proj has 32 inputs in each process; set it to auto, or"):
            with_packed_base(tmp_path / "16", mesh)
    parts = [own_columns(whole, 128, part, 2) for part in range(2)]
    unpacked = torch.cat([unpack(each, 64, dtype=torch.float32) for each in parts], dim=1)
    assert torch.equal(unpacked, unpack(whole, 128, dtype=torch.float32))


def with_packed_base(path, mesh):
    """A layer's last part of the base, split and without memory, and the same one packed whole."""
    model = AutoModelForCausalLM.from_pretrained(path)
    whole = pack(model.model.layers[0].mlp.down_proj.weight.detach())
    layers = SplitLayers(mesh, num_shards=1)
    layers.split(model)
    lora = LoraSection(rank=4, base="nf4", target_modules=("q_proj",))
    next(Injection(lora, Splitting(layers), torch.device("cpu")).around(model.to("meta")))
    return model.model.layers[0].mlp.down_proj, whole
