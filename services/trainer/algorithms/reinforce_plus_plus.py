"""REINFORCE++: PPO's clip without a critic; advantages are normalised over the whole step, not over a group."""

from __future__ import annotations

import numpy as np

from services.trainer.algorithms.base import Advantages, Algorithm, Clip, Normalization, Rewards
from services.trainer.algorithms.grpo import EPS, centered_rewards
from services.trainer.algorithms.terms.surrogates import clipped


def step_advantages(rewards: Rewards) -> Advantages:
    """`(r - mean) / (std + eps)` over the samples of a step, float32[B]; zeros when all rewards are equal.

    Source: REINFORCE++ (arXiv 2501.03262), global advantage normalisation. Difference: the paper takes the KL penalty
    off the token rewards; here it is a term of the loss (`kl_coefficient`).
    """
    centered = centered_rewards(rewards)
    advantages: Advantages = (centered / (centered.std() + EPS)).astype(np.float32)
    return advantages


REINFORCE_PLUS_PLUS = Algorithm(
    name="reinforce_plus_plus",
    step_advantages=step_advantages,
    surrogate=clipped,
    clip=Clip(low=0.2, high=0.2),
    normalization=Normalization.TOKENS,
)
