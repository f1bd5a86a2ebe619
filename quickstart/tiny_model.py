"""Builds the quick start's language model: Qwen2 architecture, about one million parameters, one token per byte.

Invariants:
- A saved model is an ordinary Hugging Face directory: config, safetensors weights, tokenizer, chat template.
- Every byte is one token, so any text can be encoded and a response's length in tokens is its length in characters;
  only the answer marker, four hashes and a space, is a single token.
- The same seed gives the same initial weights.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging as transformers_logging

from quickstart.arithmetic import ANSWER_MARKER

PAD_TOKEN = "<pad>"
END_TOKEN = "<eos>"
MAX_CONTEXT_TOKENS = 512
# Chat messages are rendered as plain contents, so that a chat of one user message equals the same text prompt.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Wider than the usual 0.02: at this size the default initialisation spends half of a one-minute warm start near zero.
_INITIALIZER_RANGE = 0.08


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the byte tokenizer: padding, end of text, 256 bytes and the answer marker.

    It is a Qwen2 tokenizer without merges, because loaders choose the tokenizer's class by the model's architecture
    and rebuild its splitting rules from the class: any other kind would encode differently once loaded.
    """
    tokens = [PAD_TOKEN, END_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=[],
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        unk_token=END_TOKEN,
        padding_side="left",
        model_max_length=MAX_CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(ANSWER_MARKER, normalized=False, special=False)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen2ForCausalLM:
    """Build an untrained model in float32; the output head is not tied to the embedding."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        initializer_range=_INITIALIZER_RANGE,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def save_model(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, directory: Path) -> None:
    """Write weights, config, generation config and tokenizer into one directory."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
