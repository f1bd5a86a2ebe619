"""Reads from a model what its memory depends on (`penstock.model.training_memory`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.model.training_memory import ModelShape

_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "num_experts_per_token")
_FEED_FORWARDS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


def model_shape(network: nn.Module, config: Any) -> ModelShape:
    """The shape of a model, sharded or not.

    Args:
        network: Its parameters, tied ones once.
        config: Its `transformers` configuration.
    """
    config = config.get_text_config()
    num_heads = int(config.num_attention_heads)
    head_size = int(getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    num_key_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    return ModelShape(
        num_params=sum(parameter.numel() for parameter in network.parameters()),
        num_layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        feed_forward=_feed_forward(config),
        query_width=num_heads * head_size,
        key_width=num_key_heads * head_size,
        vocab=int(config.vocab_size),
        is_tied=bool(config.tie_word_embeddings),
    )


def _feed_forward(config: Any) -> int:
    chosen = _first(config, _CHOSEN_EXPERTS)
    if chosen is None:
        return _first(config, _FEED_FORWARDS) or 4 * int(config.hidden_size)
    return chosen * (_first(config, _EXPERT_WIDTHS) or 0) + (_first(config, ("shared_expert_intermediate_size",)) or 0)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((int(value) for value in found if value is not None), None)
