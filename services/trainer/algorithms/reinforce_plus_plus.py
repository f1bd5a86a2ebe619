"""REINFORCE++: PPO's clip without a critic; advantages are normalised over the whole step, not over a group."""

from __future__ import annotations

from services.trainer.algorithms.base import Algorithm, Clip, Normalization
from services.trainer.algorithms.grpo import group_advantages
from services.trainer.algorithms.terms.surrogates import clipped

# Source: REINFORCE++ (arXiv 2501.03262), global advantage normalisation: GRPO's formula over the samples of a step.
# Difference: the paper subtracts the KL penalty from token rewards; here it is a term of the loss (`kl_coefficient`).
REINFORCE_PLUS_PLUS = Algorithm(
    name="reinforce_plus_plus",
    step_advantages=group_advantages,
    surrogate=clipped,
    clip=Clip(low=0.2, high=0.2),
    normalization=Normalization.TOKENS,
)
