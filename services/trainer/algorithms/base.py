"""Defines an algorithm: its advantages, each token's contribution to the loss, and the normalisation.

Axes: G samples of a group, B samples of a step, N loss tokens of a pack, S samples (segments) of a pack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Rewards = npt.NDArray[np.float64]
Advantages = npt.NDArray[np.float32]


class Normalization(StrEnum):
    """Divisor of the sum over tokens: known per sample or per step, so microbatches may be split arbitrarily."""

    TOKENS = "tokens"
    """All tokens of the step: long samples weigh more (DAPO)."""
    SAMPLES = "samples"
    """A sample's own tokens, then the samples of the step: every sample weighs the same (GRPO)."""
    SEQUENCES = "sequences"
    """The samples of the step: a completion is one action, its log-prob the sum of its tokens' (RLOO)."""
    MAX_TOKENS = "max_tokens"
    """The maximum completion tokens, then the samples of the step: no length weighs more (Dr. GRPO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Inputs of a surrogate for one pack; each [N]."""

    logprobs: Tensor
    """Under the weights being trained, nats; carries the gradient."""
    log_ratios: Tensor
    """`logprobs` minus the anchor's (the behaviour or the proximal policy's); carries the gradient."""
    advantages: Tensor
    segments: Tensor
    """int64[N], the sample of each token within the pack, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """How far the ratio to the anchor may deviate from 1."""

    low: float
    """A ratio below 1 - low gains nothing more."""
    high: float
    """A ratio above 1 + high gains nothing more."""

    def __post_init__(self) -> None:
        """Refuses ranges that have no meaning.

        Raises:
            ValueError: `low` outside [0, 1], or `high` negative.
        """
        if not 0.0 <= self.low <= 1.0 or self.high < 0.0:
            raise ValueError(f"clip_low must lie in [0, 1] and clip_high must not be negative: {self.low}, {self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """Contribution of a pack's tokens, before importance weights and normalisation."""

    losses: Tensor
    """[N], with gradient; smaller is better."""
    is_clipped: Tensor | None = None
    """bool[N], tokens whose ratio is too far off to count; None if no ratio is ever clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to learn from scored sample groups."""

    name: str
    surrogate: Callable[[TokenTerms, Clip], Surrogate]
    clip: Clip
    """The default range; a run may set another."""
    normalization: Normalization
    """The default normalisation; a run may set another."""
    group_advantages: Callable[[Rewards], Advantages] | None = None
    """From the rewards float64[G] of one group to float32[G]; None if `step_advantages` is set."""
    step_advantages: Callable[[Rewards], Advantages] | None = None
    """From the rewards float64[B] of the whole step to float32[B]. The step's forward passes then begin when its last
    group has arrived, because the advantage of a sample depends on all."""
    has_critic: bool = False
    """Each token's advantage comes from a critic trained beside the policy; replaces the other two."""
    is_kl_in_reward: bool = False
    """The KL to the reference is subtracted from the rewards, per token if there is a critic, instead of being a term
    of the loss."""
    is_kl_in_advantage: bool = False
    """Each token's log-ratio to the reference, under the weights being trained, is subtracted from its advantage,
    instead of being a term of the loss: the policy gradient of the per-token KL."""
    needs_siblings: bool = True
    """A sample's advantage compares it with others: a group of one teaches nothing."""
    is_off_policy: bool = False
    """Valid for samples of any policy: no importance weights, and samples may be trained on again."""
    needs_kl: bool = False
    """Balances rewards against the KL to the reference: a run must set `kl_coefficient`."""
    needs_teacher: bool = False
    """Learns from a reference that is another model: a run must name it."""

    def __post_init__(self) -> None:
        """Exactly one estimator.

        Raises:
            ValueError: none or several are set.
        """
        if [self.group_advantages is None, self.step_advantages is None, not self.has_critic].count(False) != 1:
            raise ValueError(f"{self.name}: one of group_advantages, step_advantages and has_critic must be set")


def divisor(normalization: Normalization, *, num_tokens: int, num_samples: int) -> int:
    """Divisor of the gradient of a whole step.

    Args:
        normalization: The run's.
        num_tokens: loss tokens of the step.
        num_samples: samples of the step that have any.
    """
    return num_tokens if normalization is Normalization.TOKENS else num_samples
