"""The model of a step whose critic is a service of its own: the critic computes while the policy does.

For each pack, and for each optimiser step:

    policy   forward, backward ---+             own norm finite? --> step --+
    critic   forward, backward ---+ both done   its norm finite?            +--> its step, on its disk

Invariants:
- The losses, their order and what is refused are those of a critic in the trainer.
- The critic never steps without the policy. If the policy has stepped and the critic cannot follow, that is a
  PartialStepError: the run goes on from its last checkpoint, to which the critic returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import FencedError, PenstockError
from services.trainer.batches.packing import Pack
from services.trainer.compute.compute_thread import InterruptedComputeError
from services.trainer.model.backend import (
    LossTotals,
    NonFiniteGradientError,
    NonFiniteLossError,
    PartialStepError,
    Quantity,
    StepBackend,
    StepMetrics,
)

Values = npt.NDArray[np.float32]


class RemoteCritic(Protocol):
    """A critic in another process. Calls raise PenstockError, and InterruptedComputeError while they wait."""

    def values(self, packs: Sequence[Pack]) -> list[Values]:
        """Values of the packs' loss tokens, float32[N] each."""

    def begin_gradient(self, packs: Sequence[Pack]) -> Future[float]:
        """Begin to add the gradient of packs; the future has the sum of their losses, not finite if not added."""

    def wait_for(self, loss: Future[float]) -> float:
        """The result of `begin_gradient`."""

    def give_up(self, loss: Future[float]) -> None:
        """End it."""

    @property
    def gradient_norm(self) -> float:
        """Norm of the mean gradient so far."""

    @property
    def num_steps(self) -> int:
        """Optimiser steps taken in the batch under way."""

    def step(self, *, rate_factor: float, is_last: bool) -> None:
        """Take the optimiser step, at that share of the peak learning rate."""

    def discard(self) -> None:
        """Discard the gradient."""

    def take_waited_s(self) -> float:
        """Seconds for which calls have waited since this was asked last."""


class CriticApart:
    """A `StepBackend` of a policy here and a critic elsewhere.

    Args:
        policy: Has no critic.
        critic: At the policy's version.
        peak_learning_rate: The policy's.
    """

    def __init__(self, policy: StepBackend, critic: RemoteCritic, *, peak_learning_rate: float) -> None:
        self._policy = policy
        self._critic = critic
        self._peak_learning_rate = peak_learning_rate

    @property
    def vocab_size(self) -> int:
        """The policy's."""
        return self._policy.vocab_size

    @property
    def max_sequence_length(self) -> int:
        """The policy's."""
        return self._policy.max_sequence_length

    @property
    def shares(self) -> tuple[float, ...]:
        """The policy's."""
        return self._policy.shares

    def forward_backward(self, *packs: Pack | None) -> LossTotals:
        """Adds both gradients, side by side; raises as a `Backend` does, PartialStepError, and PenstockError."""
        with self._whole():
            value_losses = self._critic.begin_gradient(_with_tokens(packs))
            try:
                totals = self._policy.forward_backward(*packs)
            except BaseException:
                self._critic.give_up(value_losses)
                raise
            value_loss = self._critic.wait_for(value_losses)
        if not math.isfinite(value_loss):
            raise NonFiniteLossError(f"the critic's loss of a pack is {value_loss}")
        return totals.merged(LossTotals(sums={"value_loss": value_loss}))

    def score(self, *packs: Pack | None, quantity: Quantity) -> list[Values]:
        """The critic's values, or what the policy computes; raises as a `Backend` does, and PenstockError."""
        if quantity != "values":
            return self._policy.score(*packs, quantity=quantity)
        found = iter(self._critic.values(_with_tokens(packs)))
        values = [next(found) if _has_tokens(pack) else np.empty(0, dtype=np.float32) for pack in packs]
        if not all(np.isfinite(of_pack).all() for of_pack in values):
            raise NonFiniteLossError("the critic's values are not finite")
        return values

    def optimizer_step(self, *, divisor: int, is_last: bool = True) -> StepMetrics:
        """Both steps, the policy's first; raises as a `Backend` does, PartialStepError, and FencedError."""
        critic_norm = self._critic.gradient_norm
        if not math.isfinite(critic_norm):
            self.discard_gradients()
            raise NonFiniteGradientError(f"the critic's gradient norm is {critic_norm}; no step was taken")
        metrics = self._policy.optimizer_step(divisor=divisor, is_last=is_last)
        with self._whole(has_stepped=True):
            self._critic.step(rate_factor=metrics.learning_rate / self._peak_learning_rate, is_last=is_last)
        return metrics

    def discard_gradients(self) -> None:
        """Discards both."""
        self._policy.discard_gradients()
        self._critic.discard()

    @contextmanager
    def _whole(self, *, has_stepped: bool = False) -> Iterator[None]:
        """Turns what ends a call of the critic into a PartialStepError once there is no way back."""
        has_stepped = has_stepped or self._critic.num_steps > 0
        try:
            yield
        except FencedError:
            raise
        except (PenstockError, InterruptedComputeError) as error:
            if not has_stepped:
                raise
            raise PartialStepError(f"the policy has stepped, and its critic could not follow: {error}") from error


def _has_tokens(pack: Pack | None) -> bool:
    return pack is not None and pack.num_loss_tokens > 0


def _with_tokens(packs: Sequence[Pack | None]) -> list[Pack]:
    return [pack for pack in packs if pack is not None and pack.num_loss_tokens > 0]
