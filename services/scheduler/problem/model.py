"""Defines the model of a planning problem: the numbers that memory, traffic and arithmetic depend on."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from penstock.config import StrictModel
from services.scheduler.problem.quantities import Count, Positive

_GATED_MATRICES = 3
"""Of a feed-forward network with a gate."""


class Model(StrictModel):
    """The model to train."""

    name: str = ""
    params: Positive
    layers: Count
    hidden: Count
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    ffn: Count | None = None
    """Width of the feed-forward network that every token passes; in a mixture, of the layers without experts, where it
    is as wide as what a token passes in the others unless stated."""
    vocab: Count
    tied_embeddings: bool = False
    experts: Count | None = None
    """Experts of each layer of a mixture, gated networks all; unset for a dense model."""
    experts_per_token: Count | None = None
    """Of these, those that a token is sent to."""
    expert_ffn: Count | None = None
    """Width of an expert."""
    expert_layers: Count | None = None
    """Layers that have experts; unset: all."""
    shared_ffn: Count | None = None
    """Width of what all tokens pass beside their experts; unset if there is nothing."""
    weight_bytes: Positive = 2.0
    """Bytes per parameter, in generation."""
    kv_bytes: Positive = 2.0
    """Bytes per element of the KV cache."""

    @property
    def num_dense_layers(self) -> int:
        """Layers of a mixture without experts; 0 in a dense model."""
        return 0 if self.experts is None or self.expert_layers is None else self.layers - self.expert_layers

    @property
    def expert_params(self) -> float:
        """Of all experts of all layers; 0 in a dense model."""
        layers = self.layers - self.num_dense_layers
        return layers * (self.experts or 0) * _GATED_MATRICES * self.hidden * (self.expert_ffn or 0)

    @property
    def expert_share(self) -> float:
        """Of the experts, those that a token is sent to; 1 in a dense model."""
        return (self.experts_per_token or 0) / self.experts if self.experts else 1.0

    @property
    def token_ffn(self) -> int | None:
        """Width of the feed-forward networks that a token passes together; None if it is not stated."""
        if self.experts is None:
            return self.ffn
        return (self.experts_per_token or 0) * (self.expert_ffn or 0) + (self.shared_ffn or 0)

    @model_validator(mode="after")
    def _is_more_than_its_embedding(self) -> Self:
        # The rest is multiplied with each token: without it, costs would be negative.
        embedding = self.vocab * self.hidden
        if self.params <= embedding and not self.tied_embeddings:
            raise ValueError(
                f"params: {self.params:g}; must be more than the {embedding:g} of the input embedding (vocab x hidden)"
            )
        return self

    @model_validator(mode="after")
    def _is_a_mixture_or_dense(self) -> Self:
        stated = {"experts_per_token": self.experts_per_token, "expert_ffn": self.expert_ffn}
        if self.experts is None:
            stated |= {"shared_ffn": self.shared_ffn, "expert_layers": self.expert_layers}
            others = [name for name, value in stated.items() if value is not None]
            if others:
                raise ValueError(f"{others[0]}: only for a mixture; state experts as well, or remove it")
            return self
        for name, value in stated.items():
            if value is None:
                raise ValueError(f"{name}: a mixture of {self.experts} experts needs it; state it, or remove experts")
        if (self.expert_layers or 0) > self.layers:
            raise ValueError(f"expert_layers: {self.expert_layers}; at most the {self.layers} layers")
        if self.expert_share > 1:
            raise ValueError(f"experts_per_token: {self.experts_per_token}; at most the {self.experts} experts")
        rest = self.params - self.expert_params
        if rest <= self.vocab * self.hidden * (1 if self.tied_embeddings else 2):
            raise ValueError(
                f"params: {self.params:g}; must be more than embeddings and the {self.expert_params:g} of all experts "
                f"({_GATED_MATRICES} x expert_layers x experts x hidden x expert_ffn)"
            )
        return self
