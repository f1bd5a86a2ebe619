"""Implements the light model: ridge regression of log lengths on hashed n-grams and the prompt's length.

The n-grams that individually explain the fitted lengths best are kept (Fan and Lv 2008, sure independence screening),
then the ridge weights are solved repeatedly, penalising n-grams with smaller previous weights more (Frommlet and Nuel
2016, adaptive ridge, with a floor): words that were in long prompts by chance fade, those that matter are not shrunk.
8,192 prompts take a second or two on one core. numpy alone: scikit-learn takes 1.7 s and 97 MiB to import and hashes
n-grams six times slower, and its Ridge has one penalty for all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.lengths.length_model import Arrays, LengthModel
from services.scheduler.lengths.ngrams import NUM_BUCKETS, Floats, Ngrams, ngrams
from services.scheduler.lengths.prompt_features import PromptView

RIDGE, PROMPT_LENGTH = "ridge", "prompt_length"
MAX_NGRAMS = 768
MIN_PROMPTS_PER_NGRAM = 3
_NUM_REWEIGHTINGS = 2
_WEIGHT_FLOOR = 0.05
"""Share of the mean squared weight below which the penalty no longer grows."""
_LENGTH_PENALTY = 1e-3
_NUM_LENGTH_TERMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RidgeModel:
    """Weights of the kept n-grams and of the prompt's length."""

    name: str
    kept: npt.NDArray[np.int64]
    """Buckets, ascending, [num_kept]."""
    weights: Floats
    """Nats per unit of log(1 + count), [num_kept]."""
    length_weights: Floats
    """Weights of the powers of the prompt's log length, the constant first, [_NUM_LENGTH_TERMS]."""

    def predict(self, prompts: Sequence[PromptView]) -> Floats:
        """Implements `LengthModel`."""
        entries = ngrams(prompts)
        result: Floats = _dense(self.kept, entries) @ self.weights
        return result + _length_terms(entries.lengths) @ self.length_weights

    def arrays(self) -> Arrays:
        """The arrays that `from_arrays` needs."""
        return {"kept": self.kept, "weights": self.weights, "length_weights": self.length_weights}

    @classmethod
    def from_arrays(cls, name: str, arrays: Arrays) -> RidgeModel:
        """Restore a saved model. Raises KeyError, ValueError."""
        model = cls(
            name=name,
            kept=arrays["kept"].astype(np.int64),
            weights=arrays["weights"].astype(np.float64),
            length_weights=arrays["length_weights"].astype(np.float64),
        )
        if model.kept.shape != model.weights.shape or model.length_weights.shape != (_NUM_LENGTH_TERMS,):
            raise ValueError("weights do not fit their n-grams")
        return model


@dataclass(frozen=True, slots=True, kw_only=True)
class RidgeLearner:
    """Fits `RidgeModel`s; with `max_ngrams` 0 the baseline, which uses the prompt's length alone."""

    name: str = RIDGE
    max_ngrams: int = MAX_NGRAMS
    needs_text: bool = False

    @property
    def strengths(self) -> Sequence[float]:
        """The penalties to try; the length alone needs none."""
        return (3.0, 10.0, 30.0) if self.max_ngrams else (0.0,)

    def fit(self, prompts: Sequence[PromptView], targets: Floats, weights: Floats, *, strength: float) -> LengthModel:
        """Implements `Learner`."""
        entries = ngrams(prompts)
        kept = _screened(entries, targets, weights, self.max_ngrams)
        terms = _length_terms(entries.lengths)
        design = np.concatenate([_dense(kept, entries), terms.astype(np.float32)], axis=1)
        solution = _adaptive_ridge(design, targets, weights, num_ngrams=len(kept), strength=strength)
        return RidgeModel(
            name=self.name, kept=kept, weights=solution[: len(kept)], length_weights=solution[len(kept) :]
        )

    def close(self) -> None:
        """Nothing to release."""


BASELINE = RidgeLearner(name=PROMPT_LENGTH, max_ngrams=0)


def _length_terms(lengths: Floats) -> Floats:
    return np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1)


def _dense(kept: npt.NDArray[np.int64], entries: Ngrams) -> npt.NDArray[np.float32]:
    """Values of the kept n-grams, [num_rows, num_kept]."""
    column_of = np.full(NUM_BUCKETS, -1)
    column_of[kept] = np.arange(len(kept))
    columns = column_of[entries.buckets]
    is_kept = columns >= 0
    design = np.zeros((entries.num_rows, len(kept)), dtype=np.float32)
    design[entries.rows[is_kept], columns[is_kept]] = entries.values[is_kept]
    return design


def _screened(entries: Ngrams, targets: Floats, weights: Floats, max_ngrams: int) -> npt.NDArray[np.int64]:
    """The buckets whose presence alone explains most of the targets' variance, ascending."""
    centred = targets - np.average(targets, weights=weights)
    entry_weights = weights[entries.rows]

    def total(values: Floats) -> Floats:
        return np.bincount(entries.buckets, weights=values, minlength=NUM_BUCKETS).astype(np.float64)

    counts = total(np.ones_like(entries.values))
    sums = total(entry_weights * entries.values)
    squares = total(entry_weights * entries.values**2) - sums**2 / weights.sum()
    products = total(entry_weights * entries.values * centred[entries.rows])
    is_candidate = (counts >= MIN_PROMPTS_PER_NGRAM) & (squares > 1e-6)
    scores = np.where(is_candidate, products**2 / np.maximum(squares, 1e-6), 0.0)
    best = np.argsort(-scores, kind="stable")[:max_ngrams]
    return np.sort(best[scores[best] > 0]).astype(np.int64)


def _adaptive_ridge(
    design: npt.NDArray[np.float32], targets: Floats, weights: Floats, *, num_ngrams: int, strength: float
) -> Floats:
    """Weights of the columns, the first `num_ngrams` of which are penalised."""
    scaled = design * np.sqrt(weights, dtype=np.float64).astype(np.float32)[:, None]
    gram = (scaled.T @ scaled).astype(np.float64)
    products = scaled.T.astype(np.float64) @ (targets * np.sqrt(weights))
    penalties = np.full(len(gram), _LENGTH_PENALTY)
    penalties[:num_ngrams] = strength
    solution: Floats = np.linalg.solve(gram + np.diag(penalties), products)
    for _ in range(_NUM_REWEIGHTINGS if num_ngrams else 0):
        squares = solution[:num_ngrams] ** 2
        usual = float(squares.mean()) + 1e-12
        penalties[:num_ngrams] = strength * usual / (squares + _WEIGHT_FLOOR * usual)
        solution = np.linalg.solve(gram + np.diag(penalties), products)
    return solution
