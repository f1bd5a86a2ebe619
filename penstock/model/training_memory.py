"""How much memory a process of a trainer needs, from a few numbers of its model: for trainers, planners and validators.

Counted is what PyTorch allocates for AdamW with weights, gradients and moments of float32, sharded by layers (FSDP2), a
pack at a time (`activation_memory`). Libraries, CUDA's own memory and what an allocator cannot use come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model.activation_memory import (
    end_bytes,
    expert_input_bytes,
    kept_bytes,
    layer_bytes,
    mask_bytes,
    norm_bytes,
    passing_bytes,
)
from penstock.model.decoder_shape import ModelShape

STATE_BYTES = 16
"""Of a parameter that is trained: weight, gradient and two moments in float32."""
SAVED_BYTES = 12
"""Of them, those that a checkpoint holds: all but the gradient."""
LOGITS_BYTES = 512 << 20
"""Logits that exist at a time, float32; those of one position if they are larger."""
MASTER_BYTES = 4
"""Of a weight as it is trained."""
ADAPTER_BYTES = 4
"""Of an adapter's number, as it is published."""
EXCHANGED_COPIES = 2
"""Of each copy of a token, those that exist as it is received, and as its answer is."""
GRADIENT_BYTES = 4
"""Of a parameter, as processes add gradients up."""


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
    needed = _pass_of(shape, mode)
    if mode.has_adapter:
        return _adapter_bytes(shape, mode, needed)
    if mode.is_stage:
        # When the first of a pack's microbatches has passed back, all gradients exist, and most of what is kept.
        others = max(needed.end, needed.logits, needed.recomputed)
        gradients = GRADIENT_BYTES * shape.num_params
        whole = max(needed.of_logits, needed.of_layer, gradients + needed.kept + others)
        return mode.weight_bytes * shape.num_params + whole
    if mode.num_shards == 1:
        # Autocast keeps a copy of all weights that are multiplied. Tied, both gradients and their sum exist at once.
        copies = 2 * (shape.num_params - (0 if shape.is_tied else shape.embedding_params)) if mode.is_half else 0
        gradients = 4 * shape.embedding_params * (3 if shape.is_tied else 1)
        return copies + max(needed.of_logits, needed.of_layer, gradients)
    return _sharded_bytes(shape, mode, needed)


def frozen_bytes(shape: ModelShape, pack_tokens: int) -> float:
    """What a process that only scores holds and makes: weights of 16 bits, and the peak of a pass without gradients.

    That is in a layer, beside the hidden states that go into it, or as the last states become logits.
    """
    mode = TrainingMode(num_shards=1, pack_tokens=pack_tokens, is_half=True)
    number = mode.weight_bytes
    layer = pack_tokens * layer_bytes(shape, weight_bytes=number) + 4.0 * shape.hidden * pack_tokens
    end = pack_tokens * end_bytes(shape, weight_bytes=number)
    positions = min(pack_tokens, max(1, LOGITS_BYTES // (4 * shape.vocab)))
    logits = positions * shape.vocab * 6.0 if shape.has_logits else 0.0
    return (
        number * shape.num_params
        + mask_bytes(shape, pack_tokens=pack_tokens, weight_bytes=number)
        + max(layer, end + logits)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """What a pass keeps and makes of its tokens, bytes."""

    kept: float
    """Of all layers as the backward pass begins."""
    layer: float
    """Of the layer that keeps most, with all that it needs for its gradient."""
    recomputed: float
    """The same if it is computed again, else nothing."""
    passing: float
    """Gradients within a layer."""
    end: float
    """Between the last layer and its logits."""
    logits: float

    @property
    def of_logits(self) -> float:
        """As the backward pass begins."""
        return self.kept + self.end + self.logits

    @property
    def of_layer(self) -> float:
        """As its first layer passes."""
        return self.kept + self.recomputed + self.passing


def _pass_of(shape: ModelShape, mode: TrainingMode) -> _Pass:
    tokens, number = mode.pack_tokens, mode.weight_bytes
    layer = tokens * layer_bytes(shape, weight_bytes=number)
    kept = tokens * kept_bytes(shape, weight_bytes=number)
    if mode.checkpoints_layers:
        # Layers add up in float32.
        kept = 4.0 * shape.num_layers * shape.hidden * tokens
    elif mode.has_adapter:
        # A layer that is computed again has as much of its own meanwhile.
        layer -= tokens * norm_bytes(shape)
        kept -= shape.num_layers * tokens * norm_bytes(shape)
        kept -= tokens * expert_input_bytes(shape, weight_bytes=number)
    return _Pass(
        kept=kept + mask_bytes(shape, pack_tokens=tokens, weight_bytes=number),
        layer=layer,
        recomputed=layer if mode.checkpoints_layers else 0.0,
        passing=tokens * passing_bytes(shape, weight_bytes=number),
        end=tokens * end_bytes(shape, weight_bytes=number),
        logits=_logits_bytes(shape, mode),
    )


def _adapter_bytes(shape: ModelShape, mode: TrainingMode, needed: _Pass) -> float:
    # Without gradients of weights, and with copies of none: the weights of a layer, and of the next. In a stage
    # those of all, and once more of one that is gathered.
    # Over gloo processes had two more copies of what belongs to no layer, which no tensors account for (measured).
    num_copies, num_layers = 3 if mode.is_on_cpus else 1, shape.num_layers + 1 if mode.is_stage else 2
    layer = _base_layer_bytes(shape.divided(mode.num_expert_shards), mode)
    gathered = num_copies * mode.weight_bytes * shape.root_params + num_layers * layer
    gathered = mode.unpacked_bytes + (0.0 if mode.num_shards == 1 else gathered)
    recomputed = needed.recomputed and needed.recomputed + _exchanged_bytes(shape, mode)
    return gathered + max(needed.of_logits, needed.kept + recomputed)


def _exchanged_bytes(shape: ModelShape, mode: TrainingMode) -> float:
    """What its tokens take of a layer while they are exchanged, beyond what stays of them."""
    if mode.num_expert_shards == 1:
        return 0.0
    num_copies = EXCHANGED_COPIES * shape.num_chosen_experts * mode.pack_tokens
    return float(mode.weight_bytes * num_copies * shape.hidden)


def _sharded_bytes(shape: ModelShape, mode: TrainingMode, needed: _Pass) -> float:
    # A shard of what is gathered next, on its way to the device.
    largest = max(shape.root_params, shape.largest_layer_params)
    sent_up = MASTER_BYTES * largest / mode.num_shards if mode.offloads else 0.0
    shape = shape.divided(mode.num_expert_shards)
    root, layer = mode.weight_bytes * shape.root_params, mode.weight_bytes * shape.largest_layer_params
    gradient = mode.weight_bytes * shape.embedding_params
    sent = GRADIENT_BYTES * (2 if mode.is_on_cpus else 1)
    # Weights and gradient of a layer, the weights of the next, the gradient as it is sent.
    layers = 3 * layer + sent * shape.largest_layer_params
    end_of_layer = root + gradient + layers + needed.kept + (needed.recomputed or -needed.layer)
    if mode.checkpoints_layers:
        # A layer is computed again while the gradient of the one above is sent.
        end_of_layer = max(end_of_layer, root + gradient + layers - layer + needed.of_layer)
    if mode.num_expert_shards > 1:
        # What is gathered of a layer may be less than what its tokens take while they are exchanged.
        exchanged = _exchanged_bytes(shape, mode)
        end_of_layer = max(end_of_layer, root + gradient + 2 * layer + needed.of_layer + exchanged)
    end = root + gradient * (2 if shape.is_tied else 1) + sent * shape.root_params
    return sent_up + max(root + layer + needed.of_logits, end_of_layer, end)


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
