"""What a decoder keeps of each token for its backward pass, and what passes through that pass at a time.

Counted are the tensors that PyTorch saves under `transformers`' modelling code, with attention by fused kernels: of
RMS norms what they are given and what they multiply by their weights; of linear layers what they are given, of which
autocast makes a copy for each of them; of attention queries, keys, values and its result, the latter once more as
joined segments; of feed-forward networks what their activation functions and products are given. Hidden states are
float32, what products give has their type.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.model.decoder_shape import ModelShape

_FULL = 4
_PASSING_WIDTHS = 2
"""Gradients of a feed-forward network's width that exist at a time, beyond the tensors that they take the place of."""
_PASSING_COPIES = 3
"""Of each copy of a token that is sent to an expert, the gradients that exist at a time."""
_PASSING_NORMS = 5
"""Steps of an RMS norm's backward pass, which are float32; they count where a layer ends in one."""
_LATENT_COPIES = 3
"""Of what queries, keys and values are made from: a norm's two, and what is multiplied."""


def kept_bytes(shape: ModelShape, *, weight_bytes: int) -> float:
    """Of a token in all layers, with products in numbers of that many bytes."""
    num_mixtures = shape.num_layers - shape.num_dense_layers
    of_dense = shape.num_dense_layers * _layer_bytes(_dense(shape), weight_bytes) if shape.num_dense_layers else 0.0
    return num_mixtures * _layer_bytes(shape, weight_bytes) + of_dense


def layer_bytes(shape: ModelShape, *, weight_bytes: int) -> float:
    """Of a token in the layer that keeps most."""
    return max(_layer_bytes(each, weight_bytes) for each in _kinds(shape))


def passing_bytes(shape: ModelShape, *, weight_bytes: int) -> float:
    """Gradients of a token in a layer, beyond what they take the place of."""
    return max(_passing_bytes(each, weight_bytes) for each in _kinds(shape))


def norm_bytes(shape: ModelShape) -> float:
    """Of a token in a layer, what norms keep for the gradients of their weights alone."""
    widths = (shape.num_norm_copies - 1) * shape.num_norms * shape.hidden
    return _FULL * (widths + shape.has_query_norms * (shape.query_width + shape.key_width))


def expert_input_bytes(shape: ModelShape, *, weight_bytes: int) -> float:
    """Of a token in all layers, what routers and experts keep for the gradients of their weights alone."""
    if not shape.num_chosen_experts:
        return 0.0
    widths = (1 + shape.num_chosen_experts) * shape.hidden + shape.feed_forward
    return float((shape.num_layers - shape.num_dense_layers) * weight_bytes * widths)


def end_bytes(shape: ModelShape, *, weight_bytes: int) -> float:
    """Of a token, between the last layer and its logits as the backward pass begins: the last norm's, and gradients."""
    if not shape.has_logits:
        return 3.0 * _FULL * shape.hidden
    # What is chosen of its result, and two gradients; in 16 bits their copies as well.
    num_copies = shape.num_norm_copies + (4 if weight_bytes == _FULL else 5)
    return float(_FULL * num_copies * shape.hidden)


def mask_bytes(shape: ModelShape, *, pack_tokens: int, weight_bytes: int) -> float:
    """Of the mask that all layers with a window share: none up to its length."""
    if shape.window is None or pack_tokens <= shape.window:
        return 0.0
    return 2.0 * weight_bytes * shape.window**2


def _passing_bytes(shape: ModelShape, weight_bytes: int) -> float:
    widths = max(_PASSING_WIDTHS * weight_bytes, _FULL * shape.num_passing_widths) * shape.feed_forward
    copies = _PASSING_COPIES * _FULL * shape.num_chosen_experts * shape.hidden
    return max(widths, copies, _PASSING_NORMS * _FULL * shape.hidden * shape.ends_in_norms)


def _layer_bytes(shape: ModelShape, weight_bytes: int) -> float:
    return (
        _hidden_bytes(shape, weight_bytes) + _attention_bytes(shape, weight_bytes) + _network_bytes(shape, weight_bytes)
    )


def _hidden_bytes(shape: ModelShape, weight_bytes: int) -> float:
    # In float32, linear layers that read the same keep it once.
    inputs = shape.num_inputs if weight_bytes < _FULL else min(2.0, shape.num_norms)
    return shape.hidden * (_FULL * shape.num_norm_copies * shape.num_norms + weight_bytes * inputs)


def _attention_bytes(shape: ModelShape, weight_bytes: int) -> float:
    query, key = shape.query_width, shape.key_width
    widths = 3 * query + 2 * key
    if shape.has_fused_queries:
        widths += query + key
    if shape.has_sinks and shape.window is not None:
        # A block reads as many tokens before it as it has, and copies them.
        widths += 2 * key
    num_bytes = float(weight_bytes * widths)
    if shape.has_query_norms:
        num_bytes += (_FULL + weight_bytes) * (query + key)
    return num_bytes + _LATENT_COPIES * _FULL * shape.latent_width


def _network_bytes(shape: ModelShape, weight_bytes: int) -> float:
    """Experts keep copies of both what they are given and what they answer."""
    copies = 2 * shape.num_chosen_experts * shape.hidden
    return float(weight_bytes * (shape.num_feed_forward_copies * shape.feed_forward + copies))


def _kinds(shape: ModelShape) -> tuple[ModelShape, ...]:
    return (shape, _dense(shape)) if 0 < shape.num_dense_layers < shape.num_layers else (shape,)


def _dense(shape: ModelShape) -> ModelShape:
    return replace(shape, feed_forward=shape.dense_feed_forward, num_chosen_experts=0, num_dense_layers=0.0)
