"""Counts samples by length: a histogram over buckets of constant ratio. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

BUCKETS_PER_DOUBLING = 8
"""Neighbouring buckets differ by 9 %, less than any forecast is good for."""

OUTLIVED_SHARE = 0.25


class LengthCounts:
    """Counts by length, updated in constant time; sums take as many steps as it has buckets."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.num_samples = 0

    def add(self, num_tokens: float, count: int = 1) -> None:
        """Add samples; a negative count removes them."""
        if count == 0:
            return
        bucket = _bucket(num_tokens)
        left = self._counts.get(bucket, 0) + count
        if left:
            self._counts[bucket] = left
        else:
            del self._counts[bucket]
        self.num_samples += count

    def items(self) -> Iterator[tuple[float, int]]:
        """Length and number of samples, longest first; samples without a forecast have length 0."""
        for bucket in sorted(self._counts, reverse=True):
            yield _length(bucket), self._counts[bucket]

    def sum_tokens(self, unknown_tokens: float) -> float:
        """Tokens of all samples together; those without a forecast count as `unknown_tokens`."""
        return sum((length or unknown_tokens) * count for length, count in self.items())

    def merged(self, other: LengthCounts) -> LengthCounts:
        """The sum of both."""
        both = LengthCounts()
        both._counts = self._counts + other._counts
        both.num_samples = self.num_samples + other.num_samples
        return both

    def parted(self, threshold: float) -> tuple[LengthCounts, LengthCounts]:
        """The samples longer than the threshold, and the rest."""
        long, rest = LengthCounts(), LengthCounts()
        for length, count in self.items():
            (long if length > threshold else rest).add(length, count)
        return long, rest

    def threshold(self, share: float) -> float:
        """The length that at most `share` of the samples exceed, between two buckets; 0 if there are none."""
        most = share * self.num_samples
        num_longer = 0
        for bucket in sorted(self._counts, reverse=True):
            num_longer += self._counts[bucket]
            if num_longer > most:
                return _length(bucket) * 2 ** (0.5 / BUCKETS_PER_DOUBLING)
        return 0.0


def remaining_tokens(expected_tokens: float, num_decoded: float) -> float:
    """Expected remaining tokens of a sample; if it exceeded its forecast, a share of its tokens so far.

    Lengths have heavy tails: the longer a sample is already, the more tokens remain.
    """
    return max(expected_tokens - num_decoded, OUTLIVED_SHARE * num_decoded, 1.0)


def _bucket(num_tokens: float) -> int:
    return 0 if num_tokens <= 0 else 1 + round(BUCKETS_PER_DOUBLING * math.log2(max(1.0, num_tokens)))


def _length(bucket: int) -> float:
    return 0.0 if bucket == 0 else 2.0 ** ((bucket - 1) / BUCKETS_PER_DOUBLING)
