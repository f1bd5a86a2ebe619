"""Writes a model of the quick start's size and the versions that a trainer would have published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

VOCAB_SIZE = 64
MAX_CONTEXT = 512
UPDATE_SCALE = 0.002
"""Standard deviation of a version's difference from the first, per weight; the weights' own is 0.08. About five Adam
steps at the quick start's learning rate of 4e-4."""


def make_model(directory: Path, *, num_versions: int, max_context: int = MAX_CONTEXT, seed: int = 0) -> Sequence[Path]:
    """Write a Qwen2 model of 0.8 M parameters and its versions; returns the versions' files, the first being its own.

    The weights are random: its output is meaningless, but its speed is real and its distributions are far from uniform.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        initializer_range=0.08,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    first = load_file(directory / "model.safetensors")
    files = [directory / "model.safetensors"]
    versions = directory / "versions"
    versions.mkdir()
    for index in range(1, num_versions):
        moved = {name: tensor + UPDATE_SCALE * torch.randn_like(tensor) for name, tensor in first.items()}
        files.append(versions / f"{index}.safetensors")
        save_file(moved, files[-1], metadata={"format": "pt"})
    return files
