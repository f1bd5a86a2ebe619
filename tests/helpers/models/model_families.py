"""Tiny models with random weights, one of each architecture that docs/training.md gives a verdict on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 96
WINDOW = 8
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_SLIDING_AND_FULL: Mapping[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2_moe": _MOE | {"shared_expert_intermediate_size": 16},
    "qwen3": {},
    "qwen3_moe": _MOE,
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "phi3": {},
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW},
    "gemma3_text": _SLIDING_AND_FULL,
    "olmo2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmo3": _SLIDING_AND_FULL,
    "cohere2": _SLIDING_AND_FULL,
    "exaone4": _SLIDING_AND_FULL,
    "smollm3": {},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5": {},
    "seed_oss": {},
    "starcoder2": {"sliding_window": WINDOW},
    "ministral3": {},
    "hunyuan_v1_dense": {},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "apertus": {},
    "gpt2": {},
    "gpt_neox": {},
    "glm4": {},
    "glm4_moe": _MOE | {"n_routed_experts": 4},
    "deepseek_v3": _MLA
    | {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": _SLIDING_AND_FULL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 2,
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "granitemoehybrid": {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 48,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "qwen3_next": _MOE
    | {
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        "layer_types": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "olmo_hybrid": {},
    "minimax": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "stablelm": {},
    "bloom": {},
    "gptj": {},
    "glm_moe_dsa": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
}
"""Keyword arguments of each `model_type`'s configuration, beside the common ones."""


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Its configuration, in which every kind of layer the architecture has appears."""
    return AutoConfig.for_model(model_type, **{**_COMMON, **FAMILIES[model_type], **changes})


def save_tiny(model_type: str, directory: Path, **changes: Any) -> Path:
    """A model in `directory`; sinks are drawn as trained ones are, not left at zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes))
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    return directory
