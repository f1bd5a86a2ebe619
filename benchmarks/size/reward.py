"""The reward of the run: any number will do, as long as the samples of a group differ."""

from __future__ import annotations

from collections.abc import Sequence


def by_token_ids(token_ids: Sequence[int]) -> float:
    """From 0 to 1, as good as drawn."""
    return float(sum(token_ids) % 997) / 997
