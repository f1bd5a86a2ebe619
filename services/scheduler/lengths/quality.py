"""Measures forecasts of lengths: recall of the longest, rank correlation, error, calibration. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths.ngrams import Floats

INTERVAL_SHARE = 0.8
"""Share of samples that a stated interval promises to contain."""
NUM_BUCKETS = 5


def recall_of_longest(lengths: Floats, forecasts: Floats, share: float) -> float:
    """Share of the longest `share` of the samples that is among those with the longest forecasts, 0 to 1.

    StreamRL (Zhong et al. 2025), Table 4. If the cut falls among ties, the expectation over the tied ones is given:
    siblings share a forecast, and a constant forecast finds `share` of the longest.
    """
    num_longest = max(1, round(share * len(lengths)))
    return float(_membership(lengths, num_longest) @ _membership(forecasts, num_longest) / num_longest)


def _membership(values: Floats, num_longest: int) -> Floats:
    """The chance of each to be among the longest if ties are broken at random."""
    border = np.partition(values, len(values) - num_longest)[len(values) - num_longest]
    num_above = int((values > border).sum())
    chance = (num_longest - num_above) / int((values == border).sum())
    return np.where(values > border, 1.0, np.where(values == border, chance, 0.0))


def spearman(lengths: Floats, forecasts: Floats) -> float | None:
    """Spearman's rank correlation with mean ranks for ties; None if all values of one side are equal."""
    first, second = _ranks(lengths), _ranks(forecasts)
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale > 0 else None


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = (ends - (counts - 1) / 2.0)[inverse]
    return ranks


def measure(
    lengths: Floats, forecasts: Sequence[pb.LengthForecast], *, forecaster: str, test: pb.LengthTest.ValueType
) -> pb.LengthQuality:
    """All metrics of one forecaster on at least one sample, of which each has a forecast; all or none with interval."""
    expected = np.array([forecast.expected_tokens for forecast in forecasts])
    quality = pb.LengthQuality(
        forecaster=forecaster,
        test=test,
        num_samples=len(lengths),
        recall_longest_20_percent=recall_of_longest(lengths, expected, 0.20),
        recall_longest_10_percent=recall_of_longest(lengths, expected, 0.10),
        recall_longest_5_percent=recall_of_longest(lengths, expected, 0.05),
        spearman=spearman(lengths, expected),
        mean_absolute_error_tokens=float(np.abs(lengths - expected).mean()),
    )
    if forecasts[0].HasField("low_tokens"):
        tests = zip(lengths, forecasts, strict=True)
        is_inside = [each.low_tokens <= length <= each.high_tokens for length, each in tests]
        quality.interval_coverage = float(np.mean(is_inside))
    order = np.argsort(expected, kind="stable")
    for part in np.array_split(order, min(NUM_BUCKETS, len(order))):
        quality.buckets.add(
            expected_tokens=float(expected[part].mean()),
            mean_tokens=float(lengths[part].mean()),
            num_samples=len(part),
        )
    return quality
