"""PPO with a critic: a token's advantage is its completion's return beyond the critic's expectation there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.trainer.algorithms.base import Algorithm, Clip, Normalization
from services.trainer.algorithms.terms.surrogates import clipped

if TYPE_CHECKING:
    from torch import Tensor

VALUE_CLIP = 0.2
"""Largest change of a value from the one at the start of the batch."""


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float = VALUE_CLIP) -> Tensor:
    """Per token `max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2`, [N].

    With one optimiser step per batch V is V_old where the gradient is taken, so nothing is clipped.

    Args:
        values: [N], the critic's, with gradient.
        old_values: [N], its values before the batch.
        returns: [N], the critic's targets.
        clip: How far a value may move.

    Source: Schulman et al.'s PPO2 (OpenAI baselines); Huang et al. (2022), detail 9.
    """
    held = old_values + (values - old_values).clamp(-clip, clip)
    return (values - returns).square().maximum((held - returns).square()) / 2.0


# Source: PPO (arXiv 1707.06347) eq. 7 with GAE; the KL to the reference is subtracted from the token rewards, as in
# InstructGPT (arXiv 2203.02155) eq. 2.
PPO = Algorithm(
    name="ppo",
    has_critic=True,
    needs_siblings=False,
    is_kl_in_reward=True,
    surrogate=clipped,
    clip=Clip(low=0.2, high=0.2),
    normalization=Normalization.TOKENS,
)
