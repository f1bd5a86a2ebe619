"""Defines a model of lengths: something fitted to prompts and the logarithms of their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from services.scheduler.lengths.ngrams import Floats
from services.scheduler.lengths.prompt_features import PromptView

Arrays = Mapping[str, npt.NDArray[Any]]


class FitFailedError(Exception):
    """A model could not be fitted or does not answer; the message says why. Forecasts continue without it."""


class LengthModel(Protocol):
    """A fitted model; immutable, so that threads may share it."""

    @property
    def name(self) -> str:
        """Name of its kind: ridge, prompt_length, transformer."""

    def predict(self, prompts: Sequence[PromptView]) -> Floats:
        """Expected natural logarithm of the completion's tokens, [num_prompts]. Blocks; raises FitFailedError."""


class Learner(Protocol):
    """Fits one kind of model."""

    @property
    def name(self) -> str:
        """Name of its models."""

    @property
    def needs_text(self) -> bool:
        """Whether it uses prompts' text even if their token ids are known."""

    def fit(self, prompts: Sequence[PromptView], targets: Floats, weights: Floats, *, strength: float) -> LengthModel:
        """Fit to mean log lengths, `targets` [num_prompts], each as important as its weight.

        `strength`: How strongly to regularise, one of `strengths`. Blocks for seconds or minutes; raises
        FitFailedError.
        """

    @property
    def strengths(self) -> Sequence[float]:
        """Strengths to try; the one that does best on prompts outside the fit is used."""

    def close(self) -> None:
        """Release its resources; a fit under way fails. Idempotent."""


def log_tokens(num_tokens: float) -> float:
    """The logarithm used by models; an empty completion counts as one token."""
    return float(np.log(max(1.0, num_tokens)))
