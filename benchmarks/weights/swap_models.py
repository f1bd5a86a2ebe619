"""Models with random weights in which swaps are measured: one of any size for CPUs, and real shapes for GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapModel:
    """A model to be made."""

    model_type: str
    """Hugging Face's name of the architecture."""
    config: Mapping[str, object]
    """Its sizes."""
    dtype: Literal["float32", "bfloat16"]
    """Element type of the weights, in the file and in the engine."""

    @property
    def max_context(self) -> int:
        """Longest sample, tokens."""
        return int(str(self.config["max_position_embeddings"]))

    def write(self, folder: Path) -> None:
        """Write it as one safetensors file."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        # Samples must last until the last update.
        config = AutoConfig.for_model(self.model_type, **self.config, eos_token_id=None, dtype=self.dtype)
        dtype = getattr(torch, self.dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(folder, max_shard_size="1TB")


def small_model(*, hidden_size: int, num_layers: int) -> SwapModel:
    """A Qwen2 in float32 with 256 words."""
    return SwapModel(
        model_type="qwen2",
        config={
            "vocab_size": 256,
            "hidden_size": hidden_size,
            "intermediate_size": 4 * hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": hidden_size // 32,
            "num_key_value_heads": hidden_size // 32,
            "max_position_embeddings": 4096,
        },
        dtype="float32",
    )


def qwen3_model(**sizes: int) -> SwapModel:
    """A Qwen3 in bfloat16 with these sizes."""
    shape = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936, "max_position_embeddings": 40_960}
    return SwapModel(model_type="qwen3", config={**shape, "tie_word_embeddings": True, **sizes}, dtype="bfloat16")


QWEN3 = {
    "qwen3-0.6b": qwen3_model(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "qwen3-4b": qwen3_model(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
}
"""Shapes of the published models."""
