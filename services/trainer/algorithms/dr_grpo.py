"""Dr. GRPO: GRPO without its two biases, towards short wrong answers and towards too easy or too hard prompts."""

from __future__ import annotations

import numpy as np

from services.trainer.algorithms.base import Advantages, Algorithm, Clip, Normalization, Rewards
from services.trainer.algorithms.grpo import centered_rewards
from services.trainer.algorithms.terms.surrogates import clipped


def group_advantages(rewards: Rewards) -> Advantages:
    """`r - mean` over one group, float32[G]: the scale of rewards is left alone.

    Source: Dr. GRPO (arXiv 2503.20783) section 3.2.

    Example:
        >>> group_advantages(np.array([1.0, 0.0, 0.0, 1.0])).tolist()
        [0.5, -0.5, -0.5, 0.5]
    """
    return centered_rewards(rewards).astype(np.float32)


# Source: the same, section 3.2: a constant in place of each completion's own length.
DR_GRPO = Algorithm(
    name="dr_grpo",
    group_advantages=group_advantages,
    surrogate=clipped,
    clip=Clip(low=0.2, high=0.2),
    normalization=Normalization.MAX_TOKENS,
)
