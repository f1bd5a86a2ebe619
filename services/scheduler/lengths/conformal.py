"""Measures errors of forecast log lengths and turns a forecast into tokens. Pure.

A sample's log length is modelled as the model's forecast plus the prompt's own deviation (variance `between`) plus the
sample's (variance `within`). The prompt's own lengths correct the former deviation by Bayes' rule for normal variables.
The sum is not assumed to be normal: its quantiles are those observed on prompts that the model was not fitted to (split
conformal prediction, Lei et al. 2018), and the mean in tokens is smeared over them (Duan 1983).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths.length_model import Arrays
from services.scheduler.lengths.ngrams import Floats
from services.scheduler.lengths.prompt_features import PromptLengths
from services.scheduler.lengths.quality import INTERVAL_SHARE

NUM_QUANTILES = 64
_MIN_WITHIN = 1e-3
_MAX_LOG = 17.0
"""No forecast is longer than 2^24 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastErrors:
    """Errors of a set of forecasts."""

    residuals: Floats
    """Log length of each sample less its forecast."""
    between: float
    """Variance of the prompts' own deviations."""
    within: float
    """Variance of samples about their prompts' means."""
    num_prompts: int

    @classmethod
    def of(cls, pairs: Sequence[PromptLengths], logs: Floats) -> ForecastErrors:
        """The errors of these forecasts, one per prompt; needs at least one prompt."""
        sizes = np.array([len(pair.logs) for pair in pairs])
        means = np.array([np.mean(pair.logs) for pair in pairs])
        sums = float(sum(len(pair.logs) * np.var(pair.logs) for pair in pairs))
        num_free = int((sizes - 1).sum())
        within = max(_MIN_WITHIN, sums / num_free) if num_free else _MIN_WITHIN
        between = max(_MIN_WITHIN, float(np.mean((means - logs) ** 2 - within / sizes)))
        residuals = np.concatenate([np.array(pair.logs) - log for pair, log in zip(pairs, logs, strict=True)])
        return cls(residuals=residuals, between=between, within=within, num_prompts=len(pairs))

    def joined(self, other: ForecastErrors) -> ForecastErrors:
        """The errors of both sets together."""
        share = self.num_prompts / (self.num_prompts + other.num_prompts)
        return ForecastErrors(
            residuals=np.concatenate([self.residuals, other.residuals]),
            between=share * self.between + (1 - share) * other.between,
            within=share * self.within + (1 - share) * other.within,
            num_prompts=self.num_prompts + other.num_prompts,
        )

    def shape(self) -> ErrorShape:
        """The error distribution that forecasts need."""
        middles = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        tail = (1.0 - INTERVAL_SHARE) / 2.0
        return ErrorShape(
            quantiles=np.quantile(self.residuals, middles).astype(np.float64),
            low=float(np.quantile(self.residuals, tail)),
            high=float(np.quantile(self.residuals, 1.0 - tail)),
            between=self.between,
            within=self.within,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """The distribution of a forecast's error, in nats."""

    quantiles: Floats
    """Quantiles at the middles of NUM_QUANTILES equal shares."""
    low: float
    high: float
    """Ends of the interval of INTERVAL_SHARE."""
    between: float
    within: float

    def forecast(self, log: float, own_logs: Sequence[float] = ()) -> pb.LengthForecast:
        """Turn a model's forecast and the prompt's own log lengths so far into tokens."""
        between = self.between
        if own_logs:
            own_weight = len(own_logs) * between / (len(own_logs) * between + self.within)
            log = (1.0 - own_weight) * log + own_weight * float(np.mean(own_logs))
            between *= 1.0 - own_weight
        log = min(max(log, 0.0), _MAX_LOG)
        scale = float(np.sqrt((between + self.within) / (self.between + self.within)))
        tokens = np.exp(np.minimum(log + scale * self.quantiles, _MAX_LOG))
        return pb.LengthForecast(
            expected_tokens=float(tokens.mean()),
            deviation_tokens=float(tokens.std()),
            low_tokens=float(np.exp(min(log + scale * self.low, _MAX_LOG))),
            high_tokens=float(np.exp(min(log + scale * self.high, _MAX_LOG))),
        )

    def mean_forecast(self, log: float) -> pb.LengthForecast:
        """The same without deviation and interval, which belong to another model."""
        return pb.LengthForecast(expected_tokens=self.forecast(log).expected_tokens)

    def arrays(self) -> Arrays:
        """The arrays that `from_arrays` needs."""
        return {
            "error_quantiles": self.quantiles,
            "error_scalars": np.array([self.low, self.high, self.between, self.within]),
        }

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> ErrorShape:
        """Restore a saved distribution. Raises KeyError, ValueError."""
        low, high, between, within = (float(each) for each in arrays["error_scalars"])
        quantiles = arrays["error_quantiles"].astype(np.float64)
        if quantiles.shape != (NUM_QUANTILES,):
            raise ValueError("error_quantiles: wrong shape")
        return cls(quantiles=quantiles, low=low, high=high, between=between, within=within)
