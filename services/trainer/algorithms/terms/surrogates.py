"""The clipped surrogate that most algorithms share."""

from __future__ import annotations

from services.trainer.algorithms.base import Clip, Surrogate, TokenTerms
from services.trainer.algorithms.terms.ratios import bounded_exp


def clipped(terms: TokenTerms, clip: Clip) -> Surrogate:
    """Per token, with r the ratio to the anchor: `-min(r * A, clip(r, 1 - low, 1 + high) * A)`.

    Source: PPO (arXiv 1707.06347) eq. 7.
    """
    ratios = bounded_exp(terms.log_ratios)
    free = ratios * terms.advantages
    held = ratios.clamp(1.0 - clip.low, 1.0 + clip.high) * terms.advantages
    return Surrogate(losses=-free.minimum(held), is_clipped=held < free)


def unclipped(terms: TokenTerms, clip: Clip) -> Surrogate:
    """Per token `-r * A`: the policy gradient with an importance ratio; `clip` is not read."""
    return Surrogate(losses=-bounded_exp(terms.log_ratios) * terms.advantages)
