"""A causal LM of some 80 thousand parameters with a character tokenizer, made on the spot: real files, no hub."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.model.digests import manifest_digest, safetensors_digests
from services.generator.engine.engine import WeightUpdate

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
CHARACTERS = string.ascii_lowercase + string.digits + " +-*/=.,:;?!()<>[]{}^_"
VOCABULARY = [PAD, BOS, EOS, *CHARACTERS]
VOCAB_SIZE = len(VOCABULARY)
EOS_ID = VOCABULARY.index(EOS)
MAX_CONTEXT = 512


def make_tiny_model(directory: Path, *, seed: int = 0, num_layers: int = 2, is_tied: bool = True) -> Path:
    """Writes a Qwen2 model and its tokenizer; wide initial weights, so that its distributions are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        # Heads of 32: vLLM's CPU attention knows no smaller ones.
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=is_tied,
        initializer_range=0.15,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tiny_mixture(directory: Path, *, num_layers: int = 2, num_experts: int = 4) -> Path:
    """Writes a Qwen3-MoE model with the same tokenizer, most of whose parameters are its experts'."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        moe_intermediate_size=128,
        num_experts=num_experts,
        num_experts_per_tok=1,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.15,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)


def load_tiny_model(directory: Path, weights: Path | None = None) -> Qwen2ForCausalLM:
    """The model with transformers, in float32, with other weights where a file is given."""
    model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if weights is not None:
        missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
    return model.eval()


def write_perturbed(directory: Path, target: Path, *, seed: int, scale: float = 0.05) -> Path:
    """Writes the model's weights with Gaussian noise added, as a trainer's step would change them."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    moved = {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
    save_file(moved, target, metadata={"format": "pt"})
    return target


def make_update(path: Path, *, policy_version: int) -> WeightUpdate:
    """The update that states truly what the file holds."""
    tensors = safetensors_digests(path)
    return WeightUpdate(policy_version=policy_version, path=path, tensors=tensors, digest=manifest_digest(tensors))
