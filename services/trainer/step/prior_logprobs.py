"""Log-probs that a later gradient pass compares with, computed as samples come.

They are those of the weights before the batch's first optimiser step (the proximal policy) and of the reference: all of
them are there before that step, and the rest of the batch is still being generated while they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from services.trainer.batches.packing import Trajectory, pack_trajectories
from services.trainer.model.backend import Backend, NonFiniteLossError
from services.trainer.step.step_settings import StepSettings

Logprobs = npt.NDArray[np.float32]


class PriorLogprobs:
    """Those that a step's settings ask for; `check` is called before each pass, and may raise to call it off."""

    def __init__(self, backend: Backend, settings: StepSettings, *, check: Callable[[], None]) -> None:
        self._backend = backend
        self._settings = settings
        self._check = check
        self.is_needed = settings.needs_proximal or settings.needs_reference

    def of(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The same with what is asked for, in their order; those that have it already are left as they are.

        Raises:
            NonFiniteLossError: A log-prob is not finite. Found here nothing has changed yet; after the first of several
                optimiser steps there would be no way back.
        """
        scored = list(trajectories)
        blank = [index for index, trajectory in enumerate(trajectories) if self._lacks(trajectory)]
        packs = pack_trajectories(
            [trajectories[index] for index in blank], max_pack_tokens=self._settings.max_pack_tokens
        )
        for pack in packs:
            if self._settings.needs_proximal:
                self._check()
                for member, logprobs in pack.by_member(self._backend.forward_logprobs(pack)):
                    trajectory = scored[blank[member]]
                    scored[blank[member]] = replace(trajectory, proximal_logprobs=_spread(logprobs, trajectory))
            if self._settings.needs_reference:
                self._check()
                for member, logprobs in pack.by_member(self._backend.reference_logprobs(pack)):
                    trajectory = scored[blank[member]]
                    scored[blank[member]] = replace(trajectory, reference_logprobs=_spread(logprobs, trajectory))
        return scored

    def _lacks(self, trajectory: Trajectory) -> bool:
        lacks_proximal = self._settings.needs_proximal and trajectory.proximal_logprobs is None
        return lacks_proximal or (self._settings.needs_reference and trajectory.reference_logprobs is None)


def _spread(logprobs: Logprobs, trajectory: Trajectory) -> Logprobs:
    if not np.isfinite(logprobs).all():
        raise NonFiniteLossError("log-probs before the step are not finite", [trajectory.group_id])
    return trajectory.spread(logprobs)
