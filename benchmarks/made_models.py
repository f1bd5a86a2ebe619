"""Models with random weights in the shapes of real ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.weights.swap_models import QWEN3

_COMMON = {"max_position_embeddings": 4096, "tie_word_embeddings": True}
SHAPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "154m": {
            **_COMMON,
            "vocab_size": 65_536,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        "qwen3-0.6b": QWEN3["qwen3-0.6b"].config,
        "tiny": {
            **_COMMON,
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
    }
)
"""Keyword arguments of Qwen3's configuration, by name."""


def make_model(folder: Path, shape: Mapping[str, object]) -> None:
    """A Qwen3 with random weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.bfloat16).save_pretrained(folder)
