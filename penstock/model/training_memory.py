"""How much memory a process of a trainer needs, from a few numbers of its model: for trainers, planners and validators.

Counted is what PyTorch allocates for AdamW with weights, gradients and moments of float32, sharded by layers (FSDP2), a
pack at a time. Activations are those of a decoder layer with norms of queries and keys (Qwen3); models without these
norms need less, up to a tenth of a layer's. Libraries, CUDA's own memory and what an allocator cannot use come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

STATE_BYTES = 16
"""Of a parameter that is trained: weight, gradient and two moments in float32."""
SAVED_BYTES = 12
"""Of them, those that a checkpoint holds: all but the gradient."""
LOGITS_BYTES = 512 << 20
"""Logits that exist at a time, float32; those of one position if they are larger."""
ROUTED_GRADIENTS = 2
"""Of each copy of a token that is sent to an expert, those that exist at a time."""
MASTER_BYTES = 4
"""Of a weight as it is trained."""
ADAPTER_BYTES = 4
"""Of an adapter's number, as it is published."""
EXCHANGED_COPIES = 2
"""Of each copy of a token, those that exist as it is received, and as its answer is."""
GRADIENT_BYTES = 4
"""Of a parameter, as processes add gradients up."""


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
    num_norms: float = 2.0
    """Norms of a layer's hidden states."""
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
            query_width=self.query_width // num_splits,
            key_width=self.key_width // num_splits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMode:
    """How a model is trained, as far as memory depends on it."""

    num_shards: int
    """Processes over which it is sharded."""
    pack_tokens: int
    """Tokens of one forward pass."""
    is_half: bool
    """Matrix products, gathered weights and the reference are of 16 bits."""
    num_expert_shards: int = 1
    """Of the processes over which it is sharded, those that divide its experts; no other one gathers these."""
    checkpoints_layers: bool = False
    """Only each layer's input is kept for the backward pass."""
    has_reference: bool = False
    """A copy of the weights is kept; below an adapter the weights themselves are the reference."""
    has_critic: bool = False
    has_adapter: bool = False
    """A LoRA adapter is trained, and the weights of its base are held in the type of products, or in 4 bits."""
    num_adapted: float = 0.0
    """The numbers of that adapter."""
    packed_layer_bytes: float | None = None
    """Of a layer of a base in 4 bits; None for one in the type of products."""
    unpacked_bytes: float = 0.0
    """Of the weight that such a layer multiplies with."""
    offloads: bool = False
    """Weights, gradients, moments and reference rest in the machine's memory, and go to the device layer by layer."""
    is_stage: bool = False
    """Weights of all layers stay gathered, and gradients whole, until a pack's microbatches have passed."""
    is_on_cpus: bool = False
    """Processes meet over gloo, which adds up a copy of the gradients that it is given."""

    @property
    def weight_bytes(self) -> int:
        """Of a weight that is gathered, or multiplied."""
        return 2 if self.is_half else 4


def held_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    """What one process holds on its device all the time: a shard of weights, gradients, moments, reference, critic."""
    return 0.0 if mode.offloads else _state_bytes(shape, mode)


def offloaded_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    """The same where it rests in the machine's memory instead."""
    return _state_bytes(shape, mode) if mode.offloads else 0.0


def _state_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    trained = STATE_BYTES * shape.num_params
    if mode.has_adapter:
        base = mode.weight_bytes * shape.root_params + shape.num_layers * _base_layer_bytes(shape, mode)
        trained = base + STATE_BYTES * mode.num_adapted
    if mode.has_critic:
        # All but an output layer, which a tied one is not by itself.
        is_whole = shape.is_tied and shape.has_embedding
        trained += STATE_BYTES * (shape.num_params - (0 if is_whole else shape.embedding_params))
    reference = mode.weight_bytes * shape.num_params if mode.has_reference else 0.0
    return (trained + reference) / mode.num_shards


def _base_layer_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    return mode.weight_bytes * shape.layer_params if mode.packed_layer_bytes is None else mode.packed_layer_bytes


def copied_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    """What one process copies for a checkpoint, in the memory of its machine, until it is written.

    Only where there is memory enough: otherwise training waits until it is written.
    """
    num_trained = (mode.num_adapted if mode.has_adapter else shape.num_params) + (
        shape.num_params if mode.has_critic else 0
    )
    return SAVED_BYTES * num_trained / mode.num_shards


def published_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    """What one process copies of its weights for a publication, in the memory of its machine, until it is written."""
    num_bytes = ADAPTER_BYTES * mode.num_adapted if mode.has_adapter else mode.weight_bytes * shape.num_params
    return num_bytes / mode.num_shards


def working_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    """What a forward and backward pass takes besides, at its peak: the same for any number of shards but one.

    The peak is at one of three moments: as the backward pass begins, with all activations and the logits; as its
    first layer ends, when gradients are about to be added up; and at its end, with the embedding's gradient.
    """
    # Layers add up in float32.
    hidden = 4.0 * shape.hidden * mode.pack_tokens
    layer_activations = mode.pack_tokens * _activation_bytes(shape, mode)
    if mode.has_adapter and not mode.checkpoints_layers:
        # Norms keep what they multiply with their weights for gradients of these alone; a layer that is computed again
        # has as much of its own meanwhile.
        layer_activations -= (
            4 * mode.pack_tokens * (shape.num_norms * shape.hidden + shape.query_width + shape.key_width)
        )
    kept = shape.num_layers * (hidden if mode.checkpoints_layers else layer_activations)
    of_logits = kept + 3 * hidden + _logits_bytes(shape, mode)
    # A shard of what is gathered next, on its way to the device.
    sent_up = MASTER_BYTES * max(shape.root_params, shape.layer_params) / mode.num_shards if mode.offloads else 0.0
    if mode.has_adapter:
        # Without gradients of weights, and with copies of none: the weights of a layer, and of the next.
        # Over gloo processes had two more copies of what belongs to no layer, which no tensors account for (measured).
        num_copies = 3 if mode.is_on_cpus else 1
        gathered = num_copies * mode.weight_bytes * shape.root_params + 2 * _base_layer_bytes(shape, mode)
        gathered = mode.unpacked_bytes + (0.0 if mode.num_shards == 1 else gathered)
        return gathered + max(of_logits, kept + layer_activations if mode.checkpoints_layers else 0)
    # Before a layer's activations are freed, experts' gradients of all copies of its tokens exist as well.
    of_layer = kept + (layer_activations if mode.checkpoints_layers else 0)
    of_layer += ROUTED_GRADIENTS * shape.num_chosen_experts * hidden
    if mode.is_stage:
        # As much as if the pack's last microbatch were all of it.
        return (mode.weight_bytes + GRADIENT_BYTES) * shape.num_params + max(of_logits, of_layer)
    if mode.num_shards == 1:
        # Autocast keeps a copy of all weights that are multiplied. Tied, both gradients and their sum exist at once.
        copies = 2 * (shape.num_params - (0 if shape.is_tied else shape.embedding_params)) if mode.is_half else 0
        gradients = 4 * shape.embedding_params * (3 if shape.is_tied else 1)
        return copies + max(of_logits, of_layer, gradients)
    shape = shape.divided(mode.num_expert_shards)
    root, layer = mode.weight_bytes * shape.root_params, mode.weight_bytes * shape.layer_params
    gradient = mode.weight_bytes * shape.embedding_params
    sent = GRADIENT_BYTES * (2 if mode.is_on_cpus else 1)
    # Weights and gradient of a layer, the weights of the next, the gradient as it is sent.
    layers = 3 * layer + sent * shape.layer_params
    end_of_layer = root + gradient + layers + kept + (1 if mode.checkpoints_layers else -1) * layer_activations
    end = root + gradient * (2 if shape.is_tied else 1) + sent * shape.root_params
    if mode.num_expert_shards > 1:
        # What is gathered of a layer may be less than what its tokens take while they are exchanged.
        exchanged = mode.weight_bytes * EXCHANGED_COPIES * shape.num_chosen_experts * shape.hidden * mode.pack_tokens
        end_of_layer = max(end_of_layer, root + gradient + 2 * layer + of_layer + exchanged)
    return sent_up + max(root + layer + of_logits, end_of_layer, end)


def _logits_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    """A slice of logits, with its copy in 16 bits, and the gradient of the output layer's weight."""
    if not shape.has_logits:
        return 0.0
    positions = min(mode.pack_tokens, max(1, LOGITS_BYTES // (4 * shape.vocab)))
    # Added up over slices in float32, each slice's in 16 bits.
    logits = positions * shape.vocab * (6 if mode.is_half else 4)
    if mode.has_adapter:
        return logits
    is_added_up = mode.num_shards == 1 or positions < mode.pack_tokens
    gradient = 6 if mode.is_half and is_added_up else mode.weight_bytes
    return logits + gradient * shape.embedding_params


def _activation_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    """Of a token in one layer: norms keep inputs and results, products their inputs, experts copies of both."""
    copies, norms = shape.num_chosen_experts * shape.hidden, 8 * shape.num_norms * shape.hidden
    feed_forward = shape.num_feed_forward_copies * shape.feed_forward
    if mode.is_half:
        widths = 18 * shape.query_width + 10 * shape.key_width + 2 * feed_forward
        return norms + 4 * shape.hidden + widths + 4 * copies
    widths = 20 * shape.query_width + 16 * shape.key_width + 4 * feed_forward
    return norms + 8 * shape.hidden + widths + 8 * copies
