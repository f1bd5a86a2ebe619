"""CISPO: the importance weight is clipped, not the token: every token keeps a gradient."""

from __future__ import annotations

from services.trainer.algorithms.base import Algorithm, Clip, Normalization, Surrogate, TokenTerms
from services.trainer.algorithms.grpo import group_advantages
from services.trainer.algorithms.terms.ratios import bounded_exp


def weighted_reinforce(terms: TokenTerms, clip: Clip) -> Surrogate:
    """Per token `-sg(clip(r, 1 - low, 1 + high)) * A * logprob`, sg: no gradient.

    Source: MiniMax-M1 (arXiv 2506.13585) eqs. 4 and 5.
    """
    ratios = bounded_exp(terms.log_ratios.detach())
    weights = ratios.clamp(1.0 - clip.low, 1.0 + clip.high)
    return Surrogate(losses=-weights * terms.advantages * terms.logprobs, is_clipped=weights != ratios)


# Source: the same: no lower bound (a ratio is never below 0), one mean over all tokens. The paper tunes the upper bound
# and does not print it; 0.28 is DAPO's.
CISPO = Algorithm(
    name="cispo",
    group_advantages=group_advantages,
    surrogate=weighted_reinforce,
    clip=Clip(low=1.0, high=0.28),
    normalization=Normalization.TOKENS,
)
