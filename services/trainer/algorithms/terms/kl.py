"""Estimates of a KL divergence from the log-probs of sampled tokens."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from services.trainer.algorithms.terms.ratios import MAX_LOG_RATIO


class KlEstimator(StrEnum):
    """Schulman's three."""

    K1 = "k1"
    """`-d`: unbiased, of either sign, the greatest variance. As a loss term it has no gradient on average."""
    K2 = "k2"
    """`d^2 / 2`: biased, never negative; its gradient is the KL's own."""
    K3 = "k3"
    """`exp(d) - d - 1`: unbiased, never negative (GRPO)."""


def estimated_kl(sampled_logprobs: Tensor, other_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(sampled, other), with d = other - sampled, [N].

    Args:
        sampled_logprobs: [N], under the policy that the tokens were (about) sampled from.
        other_logprobs: [N], under the policy compared with it.
        estimator: which of the three.

    Source: Schulman, "Approximating KL divergence" (2020); k3 in DeepSeekMath (arXiv 2402.03300) eq. 4.
    """
    difference = (other_logprobs - sampled_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator is KlEstimator.K1:
        return -difference
    if estimator is KlEstimator.K2:
        return difference.square() / 2.0
    return torch.exp(difference) - difference - 1.0
