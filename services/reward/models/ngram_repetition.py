"""Minus the share of n-grams that occurred before in the same completion: 0 without repetition, down to -1.

Source: the repetition penalty of "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv 2502.03373, algorithm
1), as one value for the completion instead of one for each of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from penstock.rewards import RewardItem
from services.reward.models.config import NgramRepetitionConfig
from services.reward.models.length import num_completion_tokens


def ngram_repetition(item: RewardItem, config: NgramRepetitionConfig) -> float:
    """The value, at least -`cap`. Raises UnscorableError: tokens are to be counted, and were not sent."""
    if config.unit == "tokens":
        num_completion_tokens(item)
        return -min(config.cap, repeated_share(item.token_ids, config.n))
    return -min(config.cap, repeated_share(item.completion.casefold().split(), config.n))


def repeated_share(units: Sequence[str] | Sequence[int], n: int) -> float:
    """The share of n-grams that are equal to an earlier one; 0 for fewer than two n-grams.

    Takes time linear in the units. N-grams are compared by 64-bit hashes, which keeps memory small for long texts.
    """
    num_ngrams = len(units) - n + 1
    if num_ngrams < 2:
        return 0.0
    ngrams = zip(*(islice(units, start, None) for start in range(n)), strict=False)
    return 1.0 - len(set(map(hash, ngrams))) / num_ngrams
