"""0 for a completion of the right number of tokens, down to -1 for one far from it."""

from __future__ import annotations

from penstock.rewards import RewardItem, UnscorableError
from services.reward.models.config import LengthConfig


def length_value(num_tokens: int, config: LengthConfig) -> float:
    """The value of a completion of `num_tokens` tokens, -1 to 0.

    Sources: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), L_max being `max_tokens` and L_cache
    `buffer_tokens`; for `target_tokens` LCPO-Exact of L1 (arXiv 2503.04697) without its term for the answer, divided
    by the target and cut at -1.
    """
    if config.target_tokens is not None:
        return -min(1.0, abs(num_tokens - config.target_tokens) / config.target_tokens)
    assert config.max_tokens is not None
    assert config.buffer_tokens is not None
    over = num_tokens - (config.max_tokens - config.buffer_tokens)
    return -min(1.0, max(0, over) / config.buffer_tokens)


def num_completion_tokens(item: RewardItem) -> int:
    """How many tokens a completion has. Raises UnscorableError if its token ids were not sent."""
    if item.completion and not item.token_ids:
        raise UnscorableError("this sample came without token ids, by which its length is counted")
    return len(item.token_ids)
