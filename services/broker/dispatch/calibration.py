"""Learns how true lengths follow from forecasts, from prompts whose samples have ended. Pure.

    log(length) = offset + slope * log(forecast) + what the samples of a prompt share + what is each one's own

A forecaster that is off by a factor shows in the offset. One that exaggerates shows in the slope: if forecasts are
noisy the longest of them are long by luck too, and their samples turn out shorter (regression to the mean). The part
that a prompt's samples share is distributed as among the seen prompts with similar forecasts, as its distribution is
seldom normal and seldom the same for all: no sample is as long as the longest forecast that is far too long.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist, fmean, linear_regression, pstdev, pvariance

MIN_PROMPTS = 8
"""With fewer prompts a slope is a guess, and 1 is assumed."""
MAX_SLOPE = 2.0
_FAR = 20.0
"""Deviations beyond which the tail's asymptote is used; the error function is 0 from 38."""
MIN_OWN_ERROR = 0.05
"""Floor of the deviation within a prompt: samples that never differed yet may."""
MIN_BANDWIDTH = 0.05
"""Forecasts that differ by 5 % are alike."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """Usual length of one prompt's samples: the part they share, and its likelihood."""

    medians: Sequence[float]
    """Logarithms of tokens, ascending."""
    sums: Sequence[float]
    """Sums of weights up to each median."""

    def median(self, share: float) -> float:
        """Logarithm of the median length; `share`, 0 to 1, of such prompts stay below it."""
        return self.medians[min(bisect_left(self.sums, share * self.sums[-1]), len(self.sums) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """See the module."""

    offset: float = 0.0
    slope: float = 1.0
    shared: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    """For each seen prompt, the logarithm of the forecast and its samples' shared part, ascending in the latter."""
    bandwidth: float = math.inf
    """Standard deviation of the kernel over logarithms of forecasts, which decides which are similar."""
    own_error: float = 0.0
    """Standard deviation of each sample's own part."""

    def outlook(self, forecast: float, *, ended: Sequence[int] = (), running: Sequence[int] = ()) -> Outlook:
        """The usual length for a prompt with this forecast, by Bayes' rule.

        Args:
            forecast: More than 0.
            ended: Tokens of its samples that have ended.
            running: Tokens so far of the others.
        """
        place = math.log(forecast)
        medians = [self.offset + self.slope * place + deviation for _, deviation in self.shared]
        logs = [-(((place - x) / self.bandwidth) ** 2) / 2 for x, _ in self.shared]
        spread = max(self.own_error, MIN_OWN_ERROR)
        for tokens in ended:
            logs = [
                log - ((math.log(tokens) - median) / spread) ** 2 / 2 for log, median in zip(logs, medians, strict=True)
            ]
        for tokens in running:
            logs = [
                log + _log_survival((math.log(tokens) - median) / spread)
                for log, median in zip(logs, medians, strict=True)
            ]
        # Relative to the likeliest: otherwise nothing would have any weight far from all seen prompts.
        most = max(logs)
        return Outlook(medians, list(accumulate(math.exp(log - most) for log in logs)))


def normal(*, shared_error: float, own_error: float) -> Calibration:
    """The calibration of forecasts that are right on average, with normal errors."""
    deviations = NormalDist().quantiles(n=20)
    return Calibration(shared=tuple((0.0, shared_error * deviation) for deviation in deviations), own_error=own_error)


def calibrated(prompts: Iterable[tuple[float, Sequence[float]]]) -> Calibration:
    """Fit by least squares over prompts: the forecast and the lengths of at least one sample, both above 0.

    Source: bandwidth by Scott (1992), Multivariate Density Estimation, section 6.3: 1.06 times the standard deviation
    times the number to the power of -1/5.
    """
    places: list[float] = []
    logs: list[list[float]] = []
    for forecast, lengths in prompts:
        places.append(math.log(forecast))
        logs.append([math.log(length) for length in lengths])
    if not logs:
        return Calibration()
    means = [fmean(group) for group in logs]
    slope = _slope(places, means)
    offset = fmean(means) - slope * fmean(places)
    deviations = [mean - offset - slope * place for mean, place in zip(means, places, strict=True)]
    own_variance = _own_variance(logs)
    # A mean over few samples deviates by their own errors too.
    between = pvariance(deviations)
    noise = own_variance * fmean(1 / len(group) for group in logs)
    shrunk = math.sqrt(max(0.0, 1 - noise / between)) if between else 0.0
    return Calibration(
        offset=offset,
        slope=slope,
        shared=tuple(
            sorted(
                ((place, shrunk * deviation) for place, deviation in zip(places, deviations, strict=True)),
                key=lambda item: item[1],
            )
        ),
        bandwidth=max(MIN_BANDWIDTH, 1.06 * pstdev(places) * len(places) ** -0.2),
        own_error=math.sqrt(own_variance),
    )


def _log_survival(deviations: float) -> float:
    """Logarithm of the probability that a normal variable is more than this many deviations above its mean."""
    if deviations > _FAR:
        return -(deviations**2) / 2 - math.log(deviations * math.sqrt(2 * math.pi))
    return math.log(math.erfc(deviations / math.sqrt(2)) / 2)


def _slope(places: Sequence[float], means: Sequence[float]) -> float:
    if len(means) < MIN_PROMPTS or max(places) - min(places) < MIN_BANDWIDTH:
        return 1.0
    return min(max(linear_regression(places, means).slope, 0.0), MAX_SLOPE)


def _own_variance(logs: Sequence[Sequence[float]]) -> float:
    """Variance within prompts (one-way analysis of variance)."""
    num_free = sum(len(group) for group in logs) - len(logs)
    return sum(len(group) * pvariance(group) for group in logs) / num_free if num_free else 0.0
