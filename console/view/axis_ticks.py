"""Chooses round numbers for an axis."""

from __future__ import annotations

import math


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About `count` round numbers that cover low to high; at least two."""
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
    rough = span / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]
