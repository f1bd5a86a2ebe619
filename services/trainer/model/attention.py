"""Attention over packed rows, plugged into `transformers` models by name.

A row holds several whole segments. A causal fused kernel attends to each one separately, which costs nothing for the
tokens of other segments and builds no [T, T] mask.

The mask is the model's own: `transformers` builds it as a function of positions (causal, sliding window, chunks), and
that function is evaluated at positions of a segment. Queries go in blocks as long as a window or chunk, so that memory
and time grow with a segment's length, not its square. Any other feature of a model's attention is computed exactly
(sinks) or refused by name; none is ignored.

Measured (2.0 M-parameter Qwen2, float32, one core, 256 sequences of 61 tokens on average): 112 samples/s; right-padded
attention over length-sorted packs 106-109; right-padded batches sorted by length 78-107; a block-diagonal
mask of 512 tokens 81. Only this one does not depend on the order of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from services.trainer.batches.packing import Pack

PACKED_ATTENTION = "penstock_packed"
"""Value of `attn_implementation`; forward calls then need the output of `packed_inputs`."""
_WITHOUT_EFFECT = frozenset(
    (
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    )
)
"""Arguments that models pass to their attention and no attention function reads: query and key contain positions."""


class PackedAttentionError(ValueError):
    """A model needs a kind of attention that packed attention cannot compute exactly."""


def register_packed_attention() -> None:
    """Registers `PACKED_ATTENTION` with `transformers` in this process; idempotent."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _packed_mask)


def packed_inputs(pack: Pack, device: torch.device) -> dict[str, Any]:
    """The arguments for calling a model with `PACKED_ATTENTION`."""
    token_ids = torch.from_numpy(pack.token_ids).to(device)[None]
    return {
        "input_ids": token_ids,
        "position_ids": torch.from_numpy(pack.position_ids).to(device)[None],
        # Nothing is padding. Without this mask, `transformers` would detect packed rows and mask by row position.
        "attention_mask": torch.ones_like(token_ids),
        "segment_lengths": pack.segment_lengths,
        "use_cache": False,
    }


class PackedMask:
    """The mask of a model's layers, as a function of positions in a segment."""

    def __init__(self, allows: Callable[..., Tensor], *, local_size: int | None, device: torch.device) -> None:
        self.local_size = local_size
        """Window or chunk, tokens; up to this length a segment's mask is merely causal. None: at any length."""
        self._allows = allows
        self._device = device
        self._of_block: Tensor | None = None

    def of_block(self, length: int, *, has_sink: bool, dtype: torch.dtype) -> Tensor:
        """[length, local_size + length]: what is added to the scores of a block's queries, 0 or -inf.

        A block begins at a multiple of `local_size`, is at most as long, and reads the `local_size` keys before it and
        its own; windows and chunks are the same for all such blocks. With a sink a first column lets all read it.
        All calls share one tensor, which each of them keeps for its gradient; a model's layers differ in neither
        sinks nor type.
        """
        assert self.local_size is not None
        if self._of_block is None:
            position = torch.arange(2 * self.local_size, device=self._device)
            row = position.new_zeros(())
            allowed = self._allows(row, row, position[self.local_size :, None], position[None, :])
            allowed = pad(allowed, (1, 0), value=True) if has_sink else allowed
            mask = torch.zeros(allowed.shape, dtype=dtype, device=self._device)
            self._of_block = mask.masked_fill_(~allowed, -math.inf)
        return self._of_block[:length, : has_sink + self.local_size + length]


def packed_attention(  # noqa: PLR0913 - the signature is the one that transformers calls
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    segment_lengths: tuple[int, ...] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Block-diagonal causal attention, in the signature that `transformers` models call.

    Args:
        module: the layer; unused.
        query: [1, num_heads, T, head_dim].
        key: [1, num_kv_heads, T, head_dim].
        value: like `key`; its head_dim may be another.
        attention_mask: the PackedMask that `transformers` was given for this layer.
        segment_lengths: tokens of each segment, summing to T.
        scaling: softmax scale; 1 / sqrt(head_dim) when None.
        sliding_window: must agree with the mask, which is what counts.
        dropout: must be 0; the log-probs would not be those of the policy.
        s_aux: [num_heads], attention sinks: a logit of each head that takes part in the softmax and has no value.
        is_causal: must not be False.
        others: must be None, or without effect on any attention function.

    Returns:
        ([1, T, num_heads, head_dim], None): output, and no attention weights.

    Raises:
        PackedAttentionError: The model needs a feature that cannot be computed exactly; it is named.
    """
    if segment_lengths is None:
        raise PackedAttentionError("it does not hand segment_lengths to its attention")
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT)
    if unknown:
        raise PackedAttentionError(f"its attention needs {', '.join(unknown)}, which packed attention does not have")
    if dropout != 0.0:
        raise PackedAttentionError(f"its attention has dropout ({dropout}) while gradients are computed")
    if is_causal is False or not isinstance(attention_mask, PackedMask):
        raise PackedAttentionError("its attention is not masked by transformers' causal masks")
    if sliding_window is not None and attention_mask.local_size is None:
        raise PackedAttentionError(f"its attention has a window of {sliding_window} tokens that its mask does not have")
    sizes = list(segment_lengths)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    # Of parts that overlap, autocast would make a copy each.
    dtype = _computing_dtype(query)
    split = (each.to(dtype).split(sizes, 2) for each in (query, key, value))
    parts = [
        _attend(*block, scale=scale, sinks=s_aux).transpose(1, 2)
        for segment in zip(*split, strict=True)
        for block in _blocks(*segment, mask=attention_mask, has_sink=s_aux is not None)
    ]
    return torch.cat(parts, dim=1), None


def _blocks(
    query: Tensor, key: Tensor, value: Tensor, *, mask: PackedMask, has_sink: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Queries of a segment, each with the keys and values that it may read and what is added to their scores.

    A mask of the whole segment would grow with the square of its length; None stands for a causal one.
    """
    length, size = query.shape[2], mask.local_size
    if size is None or length <= size:
        yield query, key, value, None
        return
    yield query[:, :, :size], key[:, :, :size], value[:, :, :size], None
    for start in range(size, length, size):
        end = min(start + size, length)
        read, of_block = slice(start - size, end), mask.of_block(end - start, has_sink=has_sink, dtype=query.dtype)
        yield query[:, :, start:end], key[:, :, read], value[:, :, read], of_block


def _computing_dtype(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attention of one block of queries.

    Sinks are a position before the first: its key gives every query its head's logit, its value is zero. An extra
    feature carries the logit: it is logit / scale in queries, 1 in the sink's key and 0 in all other keys.
    """
    attend = partial(scaled_dot_product_attention, is_causal=mask is None, scale=scale, enable_gqa=True)
    num_features = value.shape[-1]
    if sinks is not None:
        logits = (sinks / scale).to(query.dtype).view(1, -1, 1, 1).expand(1, -1, query.shape[2], 1)
        query = torch.cat([query, logits], dim=-1)
        key = pad(key, (0, 1, 1, 0))
        key[:, :, 0, -1] = 1.0
        value = pad(value, (0, 0, 1, 0))
        if mask is None:
            # A causal mask is that of a square.
            query = pad(query, (0, 0, 1, 0))
    if num_features < key.shape[-1]:
        # The fused kernels need values as wide as keys; others hold all scores.
        value = pad(value, (0, key.shape[-1] - num_features))
    attended = attend(query, key, value, attn_mask=mask)[..., :num_features]
    return attended if sinks is None or mask is not None else attended[:, :, 1:]


def _packed_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: object,
) -> PackedMask:
    """A mask in the signature that `transformers` calls; raises PackedAttentionError if a model extends the mask.

    `allow_is_causal_skip` is false if a mask is not merely causal, windowed or chunked.
    """
    if not allow_is_causal_skip or q_length != kv_length:
        raise PackedAttentionError("its attention mask is more than causal, windowed or chunked")
    return PackedMask(mask_function, local_size=local_size, device=device)
