"""Passes without gradient over the samples of a step: log-probs and values that advantages and the loss need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from services.trainer.batches.packing import Trajectory
from services.trainer.batches.rank_partition import partition, tokens_of_a_round
from services.trainer.model.backend import NonFiniteLossError, Quantity, StepBackend
from services.trainer.step.step_settings import StepSettings

Scores = dict[Quantity, npt.NDArray[np.float32]]
"""Scores of one trajectory's loss tokens, each float32[L]."""


class Scoring:
    """Makes the passes for given trajectories.

    Args:
        backend: Computes.
        max_pack_tokens: Token budget of one pack.
        check: Called before each pass; raises to cancel it.
    """

    def __init__(self, backend: StepBackend, *, max_pack_tokens: int, check: Callable[[], None]) -> None:
        self._backend = backend
        self._max_pack_tokens = max_pack_tokens
        self._check = check
        self.round_tokens = tokens_of_a_round(max_pack_tokens, shares=backend.shares)

    def of(self, trajectories: Sequence[Trajectory], quantities: Sequence[Quantity]) -> list[Scores]:
        """The quantities of each trajectory, in their order."""
        found: list[Scores] = [{} for _ in trajectories]
        if not quantities:
            return found
        rounds = partition(trajectories, max_pack_tokens=self._max_pack_tokens, shares=self._backend.shares)
        for packs in rounds:
            for quantity in quantities:
                self._check()
                scores = self._backend.score(*packs, quantity=quantity)
                for pack, of_pack in zip(packs, scores, strict=True):
                    for member, of_member in pack.by_member(of_pack) if pack is not None else ():
                        found[member][quantity] = of_member
        return found


class PriorLogprobs:
    """Log-probs that a later gradient pass compares with: those that a step's settings ask for.

    They are those of the weights before the batch's first optimiser step (the proximal policy) and of the reference.
    They are computed as samples arrive, while the rest of the batch is still being generated.
    """

    def __init__(self, scoring: Scoring, settings: StepSettings) -> None:
        self._scoring = scoring
        self._quantities: dict[str, Quantity] = {}
        """By the field of a trajectory that receives them."""
        if settings.needs_proximal:
            self._quantities["proximal_logprobs"] = "logprobs"
        if settings.needs_reference:
            self._quantities["reference_logprobs"] = "reference_logprobs"
        self.is_needed = bool(self._quantities)

    def of(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the log-probs filled in, in their order; those that have them already are unchanged.

        Raises:
            NonFiniteLossError: A log-prob is not finite. Detected here, nothing has changed yet; after the first of
                several optimiser steps there would be no way back.
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


def _spread(logprobs: npt.NDArray[np.float32], trajectory: Trajectory) -> npt.NDArray[np.float32]:
    if not np.isfinite(logprobs).all():
        raise NonFiniteLossError("log-probs before the step are not finite", [trajectory.group_id])
    return trajectory.spread(logprobs)
