"""Computes the log-probs of given tokens without ever holding the logits of all positions.

All logits of a pack of 32,768 tokens over a vocabulary of 151,936 take 20 GB, and their gradient as much again. Here
the output layer works on slices of LOGITS_BYTES: the forward pass keeps the logarithm of each position's normaliser,
and the backward pass computes the logits of a slice once more. That costs one matrix product of four;
the last slice is kept, so that nothing is computed twice where all positions fit into one.

The layer is called inside the model's own forward pass, so that whatever wraps the model (FSDP's gathers, adapters)
sees the call that it expects: while `TokenLogprobs.of` asks, the layer returns a position's log-prob in place of its
logits. What the model then does to logits must be a factor, the same for all (`logits_scaling`, `logit_scale`), which
is measured once. A model that does anything else (softcaps), or whose output layer is not an `nn.Linear`, computes all
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from penstock.model.training_memory import LOGITS_BYTES

_TOLERANCE = 0.01
"""How far logits may be from that factor, relatively: rounding to 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What the output layer computes in place of logits."""

    targets_n: Tensor
    factors_n1: Tensor
    """By which its outputs are multiplied to become the logits of the tokens' distribution."""


class TokenLogprobs:
    """Log-probs of tokens under causal language models of one architecture.

    Args:
        models: Modules to call, whose output layers it takes over.
        inputs: Arguments for a first call of the first model, which shows what becomes of its output layer's results;
            made in every process of a sharded model.
        logits_bytes: Size of a slice's logits.
    """

    def __init__(self, *models: Any, inputs: dict[str, Any], logits_bytes: int = LOGITS_BYTES) -> None:
        self._request: _Request | None = None
        self._logits_bytes = logits_bytes
        self._factor = _measured_factor(models[0], inputs)
        for model in models if self._factor is not None else ():
            head = model.get_output_embeddings()
            head.forward = partial(self._forward, head)

    def of(
        self,
        model: Any,
        inputs: dict[str, Any],
        *,
        positions_n: Tensor,
        targets_n: Tensor,
        temperatures_n: Tensor | None = None,
    ) -> Tensor:
        """The tokens' log-probs in nats, float32[N], with gradient if enabled.

        Args:
            model: One of the models.
            inputs: Arguments of the call.
            positions_n: int64[N], positions whose logits predict the tokens.
            targets_n: int64[N], the tokens.
            temperatures_n: float32[N], by which logits are divided; None for 1.
        """
        if self._factor is None:
            logits_nv = model(**inputs, logits_to_keep=positions_n).logits[0].float()
            if temperatures_n is not None:
                logits_nv = logits_nv / temperatures_n[:, None]
            # cross_entropy is log-softmax and gather in one kernel; only the sign differs.
            return -cross_entropy(logits_nv, targets_n, reduction="none")
        factors_n = torch.full(targets_n.shape, self._factor, device=targets_n.device)
        if temperatures_n is not None:
            factors_n /= temperatures_n
        with self._asking(_Request(targets_n=targets_n, factors_n1=factors_n[:, None])):
            found_1n1: Tensor = model(**inputs, logits_to_keep=positions_n).logits
        return found_1n1[0, :, 0] / self._factor

    @contextmanager
    def _asking(self, request: _Request) -> Iterator[None]:
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def _forward(self, head: nn.Linear, hidden_1nh: Tensor) -> Tensor:
        """The output layer: its logits, or what is asked for in their place, float32[1, N, 1]."""
        if self._request is None:
            return linear(hidden_1nh, head.weight, head.bias)
        logprobs_1n1: Tensor = _SlicedLogprobs.apply(
            hidden_1nh[0], head.weight, head.bias, self._request, max(1, self._logits_bytes // (4 * head.out_features))
        )
        return logprobs_1n1


class _SlicedLogprobs(torch.autograd.Function):  # type: ignore[misc]  # torch declares no types for it
    """log softmax(factor * (hidden @ weight.T + bias))[target] of each position, a slice of positions at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden_nh: Tensor, weight_vh: Tensor, bias_v: Tensor | None, request: _Request, slice_size: int
    ) -> Tensor:
        """float32[1, N, 1], not a view of anything: FSDP looks for its backward pass there."""
        kind = hidden_nh.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight_vh.dtype
        ctx.request, ctx.slice_size = request, slice_size
        parts = _Parts(hidden_nh, weight_vh, bias_v, request, ctx.dtype)
        logprobs_1n1 = torch.empty(1, len(hidden_nh), 1, device=hidden_nh.device)
        normalisers_n1 = torch.empty(len(hidden_nh), 1, device=hidden_nh.device)
        ctx.last_cv = None
        for part in _slices(len(hidden_nh), slice_size):
            logits_cv = parts.logits(part)
            chosen_c1 = logits_cv.gather(1, request.targets_n[part, None])
            largest_c1 = logits_cv.amax(dim=1, keepdim=True)
            # In place: logits of one slice are the most that ever exists.
            sums_c1 = logits_cv.sub_(largest_c1).exp_().sum(dim=1, keepdim=True)
            normalisers_n1[part] = largest_c1 + sums_c1.log()
            logprobs_1n1[0, part] = chosen_c1 - normalisers_n1[part]
            if part.stop == len(hidden_nh) and any(ctx.needs_input_grad):
                # The backward pass begins with it. Not by save_for_backward, which would keep it until that ends.
                ctx.last_cv = logits_cv.div_(sums_c1)
            # Before the next slice's are made.
            del logits_cv
        ctx.save_for_backward(hidden_nh, weight_vh, bias_v, normalisers_n1)
        return logprobs_1n1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias."""
        (gradient_1n1,) = gradients
        hidden_nh, weight_vh, bias_v, normalisers_n1 = ctx.saved_tensors
        request: _Request = ctx.request
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        parts = _Parts(hidden_nh, weight_vh, bias_v, request, ctx.dtype)
        hidden_gradient_nh = torch.empty_like(hidden_nh) if wants_hidden else None
        # Of several slices the sum is float32, also where weights were gathered in 16 bits.
        sum_dtype = weight_vh.dtype if len(hidden_nh) <= ctx.slice_size else torch.float32
        weight_gradient_vh = torch.zeros_like(weight_vh, dtype=sum_dtype) if wants_weight else None
        bias_gradient_v = torch.zeros_like(bias_v) if wants_bias else None
        for part in reversed(list(_slices(len(hidden_nh), ctx.slice_size))):
            delta_cv, ctx.last_cv = ctx.last_cv, None
            if delta_cv is None:
                delta_cv = parts.logits(part).sub_(normalisers_n1[part]).exp_()
            gradient_c1 = gradient_1n1[0, part]
            delta_cv.mul_(-gradient_c1)
            delta_cv.scatter_add_(1, request.targets_n[part, None], gradient_c1)
            delta_cv.mul_(request.factors_n1[part])
            product_cv = delta_cv.to(ctx.dtype)
            if hidden_gradient_nh is not None:
                hidden_gradient_nh[part] = (product_cv @ parts.weight_vh).to(hidden_nh.dtype)
            if weight_gradient_vh is not None:
                parts.add_outer(weight_gradient_vh, product_cv, part)
            if bias_gradient_v is not None:
                bias_gradient_v += delta_cv.sum(dim=0).to(bias_gradient_v.dtype)
            del delta_cv, product_cv
        return hidden_gradient_nh, weight_gradient_vh, bias_gradient_v, None, None


class _Parts:
    """The matrix products of a pass, in the type in which it computes."""

    def __init__(
        self, hidden_nh: Tensor, weight_vh: Tensor, bias_v: Tensor | None, request: _Request, dtype: torch.dtype
    ) -> None:
        self._hidden_nh = hidden_nh.detach().to(dtype)
        self.weight_vh = weight_vh.detach().to(dtype)
        self._bias_v = None if bias_v is None else bias_v.detach().to(dtype)
        self._request = request

    def logits(self, part: slice) -> Tensor:
        """float32[C, V], a tensor of its own."""
        with torch.autocast(self._hidden_nh.device.type, enabled=False):
            outputs_cv = linear(self._hidden_nh[part], self.weight_vh, self._bias_v)
        return outputs_cv.float().mul_(self._request.factors_n1[part])

    def add_outer(self, sum_vh: Tensor, delta_cv: Tensor, part: slice) -> None:
        """Add the weight's gradient of a slice."""
        hidden_ch = self._hidden_nh[part]
        if sum_vh.dtype == delta_cv.dtype:
            sum_vh.addmm_(delta_cv.T, hidden_ch)
        else:
            sum_vh += delta_cv.T @ hidden_ch


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(length, start + size))


def _measured_factor(model: Any, inputs: dict[str, Any]) -> float | None:
    """What the model multiplies its output layer's results by; None if that is not all it does, or is not known.

    The layer's results are replaced by numbers small and large: those of a model at its start are too small to show a
    softcap.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None
    given: list[Tensor] = []

    def replace(_module: object, _inputs: object, output: Tensor) -> Tensor:
        scale = torch.logspace(-3, 3, output.shape[-1], device=output.device).to(output.dtype)
        given.append(
            torch.where(torch.arange(len(scale), device=scale.device) % 2 == 0, scale, -scale).expand_as(output)
        )
        return given[-1]

    hook = head.register_forward_hook(replace)
    try:
        with torch.no_grad():
            logits: Tensor = model(**inputs).logits.float()
    finally:
        hook.remove()
    if len(given) != 1 or given[0].shape != logits.shape:
        return None
    ratios = logits / given[0].float()
    factor = float(ratios.median())
    # Written so that a NaN is refused.
    return factor if float((ratios - factor).abs().max()) <= _TOLERANCE * abs(factor) and factor else None
