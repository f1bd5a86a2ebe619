"""Log-probs that a later gradient pass compares with, computed as samples come.

They are those of the weights before the batch's first optimiser step (the proximal policy) and of the reference: all of
them are there before that step, and the rest of the batch is still being generated while they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from services.trainer.batches.packing import Trajectory
from services.trainer.model.backend import NonFiniteLossError, Quantity
from services.trainer.step.scoring import Scoring
from services.trainer.step.step_settings import StepSettings

Logprobs = npt.NDArray[np.float32]


class PriorLogprobs:
    """Those that a step's settings ask for."""

    def __init__(self, scoring: Scoring, settings: StepSettings) -> None:
        self._scoring = scoring
        self._quantities: dict[str, Quantity] = {}
        """By the field of a trajectory that holds them."""
        if settings.needs_proximal:
            self._quantities["proximal_logprobs"] = "logprobs"
        if settings.needs_reference:
            self._quantities["reference_logprobs"] = "reference_logprobs"
        self.is_needed = bool(self._quantities)

    def of(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same with what is asked for, in their order; those that have it already are left as they are.

        Raises:
            NonFiniteLossError: A log-prob is not finite. Found here nothing has changed yet; after the first of several
                optimiser steps there would be no way back.
        """
        filled = list(trajectories)
        blank = [
            index
            for index, trajectory in enumerate(trajectories)
            if any(getattr(trajectory, field) is None for field in self._quantities)
        ]
        scores = self._scoring.of([trajectories[index] for index in blank], list(self._quantities.values()))
        for index, found in zip(blank, scores, strict=True):
            trajectory = trajectories[index]
            fields: dict[str, Any] = {
                field: _spread(found[quantity], trajectory) for field, quantity in self._quantities.items()
            }
            filled[index] = replace(trajectory, **fields)
        return filled


def _spread(logprobs: Logprobs, trajectory: Trajectory) -> Logprobs:
    if not np.isfinite(logprobs).all():
        raise NonFiniteLossError("log-probs before the step are not finite", [trajectory.group_id])
    return trajectory.spread(logprobs)
