"""Distributions of completion lengths as problems state them: their first two moments and maximum, in tokens."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from penstock.config import StrictModel

MAX_TOKENS = 10_000_000
MAX_VALUES = 100_000

Tokens = Annotated[float, Field(gt=0, le=MAX_TOKENS)]


class LognormalLengths(StrictModel):
    """Lognormal, clipped at `max`: longer lengths count as `max`."""

    type: Literal["lognormal"]
    median: Tokens
    sigma: float = Field(gt=0, le=10)
    """Standard deviation of the logarithm."""
    max: Tokens

    def moments(self) -> tuple[float, float]:
        """E[O], tokens, and E[O^2]."""
        location = math.log(self.median)
        cut = (math.log(self.max) - location) / self.sigma
        clipped = 1.0 - _normal_cdf(cut)
        first, second = (
            math.exp(power * location + (power * self.sigma) ** 2 / 2) * _normal_cdf(cut - power * self.sigma)
            + self.max**power * clipped
            for power in (1, 2)
        )
        return first, second

    @property
    def longest(self) -> float:
        """Longest possible completion, tokens."""
        return self.max


class HistogramLengths(StrictModel):
    """Bins of equal width from `start`, uniform inside a bin."""

    type: Literal["histogram"]
    start: float = Field(ge=0, le=MAX_TOKENS)
    width: Tokens
    fractions: tuple[Annotated[float, Field(ge=0)], ...] = Field(min_length=1, max_length=MAX_VALUES)
    """Weight of each bin; they need not sum to 1."""
    max: Tokens

    @model_validator(mode="after")
    def _something_is_in_it(self) -> Self:
        if sum(self.fractions) <= 0:
            raise ValueError("fractions: all are 0; give the share of samples in each bin")
        return self

    def moments(self) -> tuple[float, float]:
        """E[O], tokens, and E[O^2]."""
        total = sum(self.fractions)
        middles = [self.start + (index + 0.5) * self.width for index in range(len(self.fractions))]
        weighted = list(zip(self.fractions, middles, strict=True))
        first = sum(share * middle for share, middle in weighted)
        second = sum(share * (middle**2 + self.width**2 / 12) for share, middle in weighted)
        return first / total, second / total

    @property
    def longest(self) -> float:
        """Longest possible completion, tokens."""
        return self.max


class FixedLengths(StrictModel):
    """Every completion has the same length."""

    type: Literal["fixed"]
    length: Tokens
    max: Tokens | None = None

    def moments(self) -> tuple[float, float]:
        """E[O], tokens, and E[O^2]."""
        return self.length, self.length**2

    @property
    def longest(self) -> float:
        """Longest possible completion, tokens."""
        return self.max or self.length


class EmpiricalLengths(StrictModel):
    """Observed lengths."""

    type: Literal["empirical"]
    values: tuple[Tokens, ...] = Field(min_length=1, max_length=MAX_VALUES)
    max: Tokens | None = None

    def moments(self) -> tuple[float, float]:
        """E[O], tokens, and E[O^2]."""
        return sum(self.values) / len(self.values), sum(value**2 for value in self.values) / len(self.values)

    @property
    def longest(self) -> float:
        """Longest possible completion, tokens."""
        return self.max or max(self.values)


OutputLengths = Annotated[
    LognormalLengths | HistogramLengths | FixedLengths | EmpiricalLengths, Field(discriminator="type")
]


def scaled(lengths: OutputLengths, factor: float) -> OutputLengths:
    """The same shape with lengths times `factor`; its bounds stay, but never below the existing lengths."""
    if isinstance(lengths, LognormalLengths):
        return lengths.model_copy(update={"median": lengths.median * factor})
    if isinstance(lengths, HistogramLengths):
        longest = max(lengths.max, (lengths.start + lengths.width * len(lengths.fractions)) * factor)
        stretched = {"start": lengths.start * factor, "width": lengths.width * factor, "max": longest}
        return lengths.model_copy(update=stretched)
    if isinstance(lengths, EmpiricalLengths):
        return lengths.model_copy(update={"values": tuple(value * factor for value in lengths.values)})
    return lengths.model_copy(update={"length": lengths.length * factor})


def _normal_cdf(value: float) -> float:
    return 0.5 * (1.0 + math.erf(value / math.sqrt(2.0)))
