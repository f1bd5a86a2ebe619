"""GSPO: the ratio, its clip and its advantage belong to the whole completion, as the reward does."""

from __future__ import annotations

from services.trainer.algorithms.base import Algorithm, Clip, Normalization, Surrogate, TokenTerms
from services.trainer.algorithms.grpo import group_advantages
from services.trainer.algorithms.terms.ratios import bounded_exp, segment_counts, segment_sums


def sequence_clipped(terms: TokenTerms, clip: Clip) -> Surrogate:
    """Per sample `-min(s * A, clip(s) * A)`, s the geometric mean of its tokens' ratios; all its tokens share it.

    The advantage of a sample is the mean of its tokens' (they are equal unless a caller sets them individually).
    Averaged over a sample's tokens and then over samples this is the paper's objective.

    Source: GSPO (arXiv 2507.18071) eqs. 5 and 7.
    """
    counts = segment_counts(terms.segments, terms.log_ratios)
    log_ratios = segment_sums(terms.log_ratios, terms.segments) / counts
    advantages = segment_sums(terms.advantages, terms.segments) / counts
    ratios = bounded_exp(log_ratios)
    free = ratios * advantages
    held = ratios.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    losses = -free.minimum(held)
    return Surrogate(losses=losses[terms.segments], is_clipped=(held < free)[terms.segments])


# Source: the same, section 5.1: clip range 3e-4 and 4e-4.
GSPO = Algorithm(
    name="gspo",
    group_advantages=group_advantages,
    surrogate=sequence_clipped,
    clip=Clip(low=3e-4, high=4e-4),
    normalization=Normalization.SAMPLES,
)
