"""RLOO: REINFORCE with the mean reward of a sample's siblings as its baseline."""

from __future__ import annotations

import numpy as np

from services.trainer.algorithms.base import Advantages, Algorithm, Clip, Normalization, Rewards
from services.trainer.algorithms.grpo import centered_rewards
from services.trainer.algorithms.terms.surrogates import unclipped


def group_advantages(rewards: Rewards) -> Advantages:
    """`r_i - mean of the others`, float32[G]: an unbiased baseline; zero for a group of one.

    Source: the RLOO estimator of Ahmadian et al. (arXiv 2402.14740), after Kool et al. (2019). It equals
    `(r - mean) * G / (G - 1)`.
    """
    centered = centered_rewards(rewards)
    num_samples = rewards.size
    if num_samples == 1:
        return centered.astype(np.float32)
    return (centered * (num_samples / (num_samples - 1))).astype(np.float32)


# Source: the same: a completion is one action; nothing is clipped.
RLOO = Algorithm(
    name="rloo",
    group_advantages=group_advantages,
    surrogate=unclipped,
    clip=Clip(low=1.0, high=0.0),
    normalization=Normalization.SEQUENCES,
)
