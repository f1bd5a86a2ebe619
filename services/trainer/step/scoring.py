"""Passes without gradient over the samples of a step: log-probs and values that advantages and the loss need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.trainer.batches.packing import Trajectory
from services.trainer.batches.rank_partition import partition, tokens_of_a_round
from services.trainer.model.backend import Backend, Quantity

Scores = dict[Quantity, npt.NDArray[np.float32]]
"""Of one trajectory's loss tokens, each float32[L]."""


class Scoring:
    """Makes the passes.

    Args:
        backend: Computes.
        max_pack_tokens: Token budget of one pack.
        check: Called before each pass; raises to call it off.
    """

    def __init__(self, backend: Backend, *, max_pack_tokens: int, check: Callable[[], None]) -> None:
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
