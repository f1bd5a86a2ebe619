"""A mixture of experts as the base of an adapter: what the transformers engine compares with the model's folder."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from services.generator.engines.transformers.loaded_weights import mismatched_base
from tests.helpers.models.model_families import save_tiny


def test_experts_that_differ_from_the_folder_are_named_and_no_others(tmp_path):
    folder = save_tiny("qwen3_moe", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert mismatched_base(model, folder) == []
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2] += 1
    assert mismatched_base(model, folder) == ["model.layers.1.mlp.experts.2.down_proj.weight"]
