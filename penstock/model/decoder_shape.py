"""The numbers of a decoder that the memory of its training depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a decoder that its memory depends on."""

    num_params: float
    num_layers: int
    hidden: int
    feed_forward: int
    """Width of the feed-forward network of one token: with experts, of those that it is sent to together."""
    query_width: int
    """Query heads times their size."""
    key_width: int
    """Key-value heads times their size."""
    vocab: int
    is_tied: bool
    """Embedding and output layer are one."""
    num_chosen_experts: int = 0
    """Experts that a token is sent to, each of which takes a copy of it; 0 without experts."""
    num_feed_forward_copies: int = 4
    """Tensors of the feed-forward network's width that a layer keeps for its gradient: four with a gate."""
    expert_params: float = 0.0
    """Of the experts of all layers; 0 without experts."""
    num_dense_layers: float = 0.0
    """Of a mixture of experts, the layers that have one network for all tokens instead."""
    dense_feed_forward: int = 0
    """The width of that network."""
    num_norms: float = 2.0
    """Norms of a layer's hidden states."""
    num_norm_copies: int = 2
    """Tensors that such a norm keeps: what it is given and, unless it is a fused one, what it weighs."""
    ends_in_norms: bool = False
    """What a layer adds to its input has a norm of its own."""
    num_passing_widths: int = 0
    """Tensors of the feed-forward network's width, in float32, that an activation function of several steps makes."""
    num_inputs: float = 5.0
    """Linear layers of a layer that read its hidden states, each of which keeps a copy in 16 bits."""
    has_query_norms: bool = True
    """Queries and keys have norms."""
    has_fused_queries: bool = False
    """Queries, keys and values are parts of one tensor, which stays as long as the values."""
    has_sinks: bool = False
    """Keys and values are copied for each block of queries, to put a sink before them."""
    latent_width: int = 0
    """Of what queries, keys and values are made from, where that is narrower than hidden states."""
    window: int | None = None
    """Tokens that some layers read at most, of which a mask is made."""
    has_logits: bool = True
    """False for a stage of layers that does not end in the output layer."""
    has_embedding: bool = True
    """False for a stage of layers that does not begin with the embedding."""

    @property
    def embedding_params(self) -> int:
        """Of the embedding, and as many of an output layer."""
        return self.vocab * self.hidden

    @property
    def root_params(self) -> int:
        """What belongs to no layer."""
        return self.embedding_params * (1 if self.is_tied else 2)

    @property
    def layer_params(self) -> float:
        """Of one layer."""
        return (self.num_params - self.root_params) / self.num_layers

    @property
    def largest_layer_params(self) -> float:
        """Of one that has experts, if only some have."""
        others = (self.num_params - self.root_params - self.expert_params) / self.num_layers
        return others + self.expert_params / max(1.0, self.num_layers - self.num_dense_layers)

    def stage(self, num_layers: int, *, is_first: bool, is_last: bool) -> ModelShape:
        """The shape of a run of its layers: with the embedding if they are the first, the output layer if the last."""
        if is_first and is_last:
            return self
        num_ends = is_first + is_last
        return replace(
            self,
            num_params=num_layers * self.layer_params + num_ends * self.embedding_params,
            num_layers=num_layers,
            expert_params=self.expert_params * num_layers / self.num_layers,
            num_dense_layers=self.num_dense_layers * num_layers / self.num_layers,
            vocab=self.vocab * num_ends,
            # An end holds one of the two.
            is_tied=True,
            has_logits=is_last,
            has_embedding=is_first,
        )

    def divided(self, num_expert_shards: int) -> ModelShape:
        """The shape of what those of several processes have together that hold the same of the divided experts."""
        held = self.expert_params / num_expert_shards
        return replace(self, num_params=self.num_params - self.expert_params + held, expert_params=held)

    def split(self, num_splits: int) -> ModelShape:
        """The shape of what one of several processes has of it that split each layer between them."""
        layers = self.num_params - self.root_params
        return replace(
            self,
            num_params=self.root_params + layers / num_splits,
            expert_params=self.expert_params / num_splits,
            feed_forward=self.feed_forward // num_splits,
            dense_feed_forward=self.dense_feed_forward // num_splits,
            query_width=self.query_width // num_splits,
            key_width=self.key_width // num_splits,
        )
