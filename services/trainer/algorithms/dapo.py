"""DAPO: GRPO with a higher upper clip, a loss averaged over tokens.

Its two other parts work with every algorithm: the soft penalty for overlong answers is in `overlong.py`
(`overlong_buffer_tokens`), and dynamic sampling, which replaces groups of equal rewards, is part of the broker
(`policy.drops_zero_variance`).
"""

from __future__ import annotations

from services.trainer.algorithms.base import Algorithm, Clip, Normalization
from services.trainer.algorithms.grpo import group_advantages
from services.trainer.algorithms.terms.surrogates import clipped

# Source: DAPO (arXiv 2503.14476) eqs. 8, 10 and 12: clip-higher with 0.28, one mean over all tokens.
DAPO = Algorithm(
    name="dapo",
    group_advantages=group_advantages,
    surrogate=clipped,
    clip=Clip(low=0.2, high=0.28),
    normalization=Normalization.TOKENS,
)
