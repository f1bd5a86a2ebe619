"""GRPO: a sample's advantage is its reward against its group's, in units of the group's standard deviation."""

from __future__ import annotations

import numpy as np

from services.trainer.algorithms.base import Advantages, Algorithm, Clip, Normalization, Rewards
from services.trainer.algorithms.terms.surrogates import clipped

EPS = 1e-6


def group_advantages(rewards: Rewards) -> Advantages:
    """`(r - mean) / (std + eps)` over one group.

    Args:
        rewards: float64[G], finite.

    Returns:
        float32[G]; exactly zero everywhere if all rewards are equal, despite rounding of their mean, so that callers
        may skip such samples.

    Source: DeepSeekMath (arXiv 2402.03300) section 4.1.2, outcome supervision. Difference: the paper states neither
    the degrees of freedom nor an eps; here the standard deviation is the population's.
    """
    centered = centered_rewards(rewards)
    advantages: Advantages = (centered / (centered.std() + EPS)).astype(np.float32)
    return advantages


def centered_rewards(rewards: Rewards) -> Rewards:
    """`r - mean`, float64[G]; exactly zero for equal rewards.

    Raises:
        ValueError: `rewards` is not one-dimensional, is empty, or holds a value that is not finite.
    """
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"rewards must have shape [G] with G >= 1, not {list(rewards.shape)}")
    if not np.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    if rewards.max() == rewards.min():
        return np.zeros(rewards.shape)
    centered: Rewards = rewards - rewards.mean(dtype=np.float64)
    return centered


# Source: DeepSeekMath eq. 3: the clipped surrogate, averaged over each sample's tokens and then over samples.
GRPO = Algorithm(
    name="grpo",
    group_advantages=group_advantages,
    surrogate=clipped,
    clip=Clip(low=0.2, high=0.2),
    normalization=Normalization.SAMPLES,
)
