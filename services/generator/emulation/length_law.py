"""Determines the lengths of emulated completions, stop token included: drawn from a law, or replayed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_LENGTH = 1 << 24

STREAMRL_HISTOGRAM = (
    *(0.125, 0.169, 0.121, 0.116, 0.077, 0.0615, 0.0527, 0.0303, 0.0332, 0.0215),
    *(0.0156, 0.0224, 0.0156, 0.0049, 0.0068, 0.0039, 0.0068, 0.0029, 0.0127, 0.0078),
    *(0.0078, 0.0195, 0.0059, 0.0068, 0.0078, 0.0107, 0.0088, 0.0107, 0.0059, 0.0088),
)
"""StreamRL (Zhong et al. 2025), Figure 7: completion lengths of a reasoning model, 30 bins of 635.2 from 828 tokens."""
STREAMRL_BIN_TOKENS, STREAMRL_FIRST_TOKENS = 635.2, 828.0


class LengthLaw(Protocol):
    """A source of completion lengths."""

    def draw(self, generator: np.random.Generator, seed: int | None) -> int:
        """A length of at least 1; `generator` is seeded by the sample's identity, `seed` is its own, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLengths:
    """Log-normal lengths."""

    mean_tokens: float
    sigma: float
    """Standard deviation of the logarithm; 0 makes all lengths equal."""

    def draw(self, generator: np.random.Generator, seed: int | None) -> int:
        """See `LengthLaw`."""
        location = math.log(self.mean_tokens) - self.sigma**2 / 2
        return max(1, round(float(generator.lognormal(location, self.sigma))))


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramLengths:
    """StreamRL's histogram, uniform within a bin, every length times `scale`."""

    scale: float = 1.0

    def draw(self, generator: np.random.Generator, seed: int | None) -> int:
        """See `LengthLaw`."""
        weights = np.asarray(STREAMRL_HISTOGRAM)
        place = generator.choice(len(weights), p=weights / weights.sum()) + generator.random()
        return max(1, round(self.scale * (STREAMRL_FIRST_TOKENS + STREAMRL_BIN_TOKENS * float(place))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedLengths:
    """Recorded lengths: a sample with seed s gets the length at s modulo their number, one without a seed a random one.

    The submitter of prompts chooses the seeds, and so which sample replays which length.
    """

    lengths: Sequence[int]

    def draw(self, generator: np.random.Generator, seed: int | None) -> int:
        """See `LengthLaw`."""
        place = int(generator.integers(len(self.lengths))) if seed is None else seed % len(self.lengths)
        return self.lengths[place]


def read_lengths(path: Path) -> ReplayedLengths:
    """Read a text file with one length per line. Raises OSError, or ValueError naming the file and the invalid line."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: larger than {MAX_FILE_BYTES} bytes; is this a file of lengths?")
    lengths: list[int] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split(), start=1):
        if not (line.isascii() and line.isdigit() and 1 <= int(line[:12]) <= MAX_LENGTH):
            raise ValueError(f"{path}: entry {number} must be a length of 1 to {MAX_LENGTH} tokens, not {line[:40]!r}")
        lengths.append(int(line))
    if not lengths:
        raise ValueError(f"{path}: holds no lengths; write one a line")
    return ReplayedLengths(lengths=lengths)
