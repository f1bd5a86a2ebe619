"""What an adapter, and a base in 4 bits below it, add to a trainer's memory or take from it (`training_memory`)."""

from __future__ import annotations

from collections.abc import Collection

from penstock.model.decoder_shape import ModelShape

PACKED_BYTES = 1 / 2 + 1 / 64
"""Of a weight in 4 bits: its code, and its part of a scale in 8 bits."""
PACKED_ROW_BYTES = 8
"""Besides, of each output."""


def adapter_params(shape: ModelShape, *, rank: int, target_modules: Collection[str]) -> float:
    """The numbers of a LoRA adapter's factors."""
    adapted = (sizes for name, sizes in _linear_layers(shape).items() if name in target_modules)
    return float(shape.num_layers * rank * sum(inputs + outputs for inputs, outputs in adapted))


def packed_layer_bytes(shape: ModelShape, *, weight_bytes: int) -> float:
    """A layer whose linear layers are in 4 bits, and the rest in the type of products."""
    linear = _linear_layers(shape).values()
    num_packed = sum(inputs * outputs for inputs, outputs in linear)
    packed = PACKED_BYTES * num_packed + PACKED_ROW_BYTES * sum(outputs for _, outputs in linear)
    return packed + weight_bytes * (shape.layer_params - num_packed)


def unpacked_bytes(shape: ModelShape, *, weight_bytes: int) -> float:
    """The largest linear layer while it multiplies: its weight, and codes and scales in the form of the kernel."""
    largest = max(inputs * outputs for inputs, outputs in _linear_layers(shape).values())
    return largest * (weight_bytes + PACKED_BYTES + 4 / 64)


def _linear_layers(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a layer's linear layers; experts are none."""
    hidden, query, key, inner = shape.hidden, shape.query_width, shape.key_width, shape.feed_forward
    attention = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
    if shape.num_chosen_experts:
        return attention
    return attention | {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
