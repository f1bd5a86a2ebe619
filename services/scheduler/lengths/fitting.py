"""Fits a model to a run's prompts and lengths, and measures its error. Pure but for the learner.

Prompts are split 7:1:2 by their key into fit, selection and test sets, as in StreamRL section 5.2. The test's numbers
are those of a model that saw 70 %. A learner with several strengths is then refitted to everything for use; one with a
single strength is slow, so the tested model is used. Newer prompts weigh more: the policy that makes the lengths
changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.lengths.conformal import ErrorShape, ForecastErrors
from services.scheduler.lengths.length_model import FitFailedError, Learner, LengthModel
from services.scheduler.lengths.prompt_features import PromptLengths, PromptView
from services.scheduler.lengths.quality import measure
from services.scheduler.lengths.ridge import BASELINE

MIN_PROMPTS = 64
"""With fewer prompts no model is fitted: seven would choose it and thirteen test it."""
HALF_LIFE_PROMPTS = 2048
"""A prompt seen this many prompts before the newest has half its weight."""
_VALIDATION, _TEST = (7,), (8, 9)
"""Tenths of the prompts, by their keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model in use, with what its forecasts need."""

    model: LengthModel
    baseline: LengthModel
    shape: ErrorShape
    qualities: tuple[pb.LengthQuality, ...]
    """Quality on held-out prompts: the model's, then the baseline's."""


def fit_lengths(pairs: Sequence[PromptLengths], learner: Learner) -> Fit:
    """Choose, test and fit. `pairs` come oldest first, at least MIN_PROMPTS. Raises FitFailedError."""
    prompts = [pair.prompt for pair in pairs]
    targets = np.array([float(np.mean(pair.logs)) for pair in pairs])
    weights = 0.5 ** (np.arange(len(pairs))[::-1] / HALF_LIFE_PROMPTS)
    tenths = np.array([prompt.key[0] * 10 // 256 for prompt in prompts])
    is_test, is_validation = np.isin(tenths, _TEST), np.isin(tenths, _VALIDATION)
    is_fitted = ~(is_test | is_validation)
    if not (is_test.any() and is_validation.any() and is_fitted.any()):
        raise FitFailedError(f"{len(pairs)} prompts are too few to fit, select and test a model")

    def fitted(which: Learner, mask: npt.NDArray[np.bool_], strength: float) -> LengthModel:
        return which.fit(_of(prompts, mask), targets[mask], weights[mask], strength=strength)

    candidates = {strength: fitted(learner, is_fitted, strength) for strength in learner.strengths}
    chosen = _of(prompts, is_validation)
    predictions = {strength: model.predict(chosen) for strength, model in candidates.items()}
    best = min(predictions, key=lambda each: float(np.mean((predictions[each] - targets[is_validation]) ** 2)))
    errors = ForecastErrors.of([pairs[index] for index in np.flatnonzero(is_validation)], predictions[best])
    tested = [pairs[index] for index in np.flatnonzero(is_test)]
    tested_logs = candidates[best].predict([pair.prompt for pair in tested])
    baseline = fitted(BASELINE, is_fitted, 0.0)
    baseline_logs = baseline.predict([pair.prompt for pair in tested])
    shape = errors.shape()
    qualities = (
        _quality(tested, map(shape.forecast, tested_logs), candidates[best].name),
        _quality(tested, map(shape.mean_forecast, baseline_logs), baseline.name),
    )
    everything = np.ones(len(pairs), dtype=bool)
    return Fit(
        model=fitted(learner, everything, best) if len(candidates) > 1 else candidates[best],
        baseline=fitted(BASELINE, everything, 0.0),
        shape=errors.joined(ForecastErrors.of(tested, tested_logs)).shape(),
        qualities=qualities,
    )


def _of(prompts: Sequence[PromptView], mask: npt.NDArray[np.bool_]) -> list[PromptView]:
    return [prompts[index] for index in np.flatnonzero(mask)]


def _quality(
    pairs: Sequence[PromptLengths], forecasts: Iterable[pb.LengthForecast], forecaster: str
) -> pb.LengthQuality:
    return measure(
        np.exp(np.concatenate([pair.logs for pair in pairs])),
        [forecast for forecast, pair in zip(forecasts, pairs, strict=True) for _ in pair.logs],
        forecaster=forecaster,
        test=pb.LENGTH_TEST_HELD_OUT,
    )
