"""Corrects for tokens that were sampled by other weights, or another engine, than those being trained."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from services.trainer.algorithms.terms.ratios import bounded_exp, segment_sums


class Correction(StrEnum):
    """How the policy before the step (proximal) is weighted against the one that sampled (behaviour)."""

    NONE = "none"
    """Not at all: ratios are taken to the behaviour policy, and clipping alone limits stale tokens."""
    DECOUPLED = "decoupled"
    """Ratios are taken to the proximal policy, and tokens weighted by proximal / behaviour (AReaL)."""
    TRUNCATED = "truncated"
    """The same with the weight cut at a bound (truncated importance sampling)."""
    MASKED = "masked"
    """The same with weights above the bound, or below its inverse, set to 0 (masked importance sampling)."""


class CorrectionLevel(StrEnum):
    """The unit that shares one weight."""

    TOKEN = "token"
    """Every token its own: less variance, biased."""
    SEQUENCE = "sequence"
    """The whole completion, the product of its tokens' ratios: unbiased before the bound, much variance."""


def importance_weights(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    segments: Tensor,
    *,
    correction: Correction,
    level: CorrectionLevel,
    max_weight: float,
) -> Tensor:
    """Weight of every token, [N], without gradient; ones for `none`.

    Args:
        proximal_logprobs: [N], under the weights just before this optimiser step.
        behavior_logprobs: [N], as recorded when sampled.
        segments: int64[N], the sample of each token within the pack.
        correction: How the ratios are used.
        level: One weight per token or per completion.
        max_weight: The bound of `truncated` and `masked`.

    Source: decoupled objective: AReaL (arXiv 2505.24298) eq. 5; truncation: Espeholt et al. (arXiv 1802.01561)
    section 4.1.
    """
    log_ratios = (proximal_logprobs - behavior_logprobs).detach()
    if correction is Correction.NONE:
        return torch.ones_like(log_ratios)
    if level is CorrectionLevel.SEQUENCE:
        log_ratios = segment_sums(log_ratios, segments)[segments]
    weights = bounded_exp(log_ratios)
    if correction is Correction.TRUNCATED:
        return weights.clamp(max=max_weight)
    if correction is Correction.MASKED:
        return torch.where((weights <= max_weight) & (weights >= 1.0 / max_weight), weights, 0.0)
    return weights
