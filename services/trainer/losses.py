"""Policy losses: pure functions from log-probabilities to a scalar to differentiate, and what to report about it.

Invariants:
- A loss returns the *sum* over its tokens. Whoever takes the optimiser step divides the accumulated gradient by the
  step's number of tokens, so microbatches of any split give the gradient of the whole batch (token-level
  normalisation, DAPO), although the total is unknown while microbatches still arrive.
- Reported values are sums and maxima, so that they merge over microbatches without weighting.
- Another algorithm is another function of type `LossFunction`; nothing else changes.

Axes: N loss tokens of a pack.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is finite in float32, and a token this far off teaches nothing."""


class Correction(StrEnum):
    """What is done about data that older weights sampled."""

    NONE = "none"
    """PPO on trainer / behaviour; clipping alone limits stale tokens."""
    TRUNCATED = "truncated"
    """Decoupled, with the importance weight cut at `max_importance_weight` (truncated importance sampling)."""
    DECOUPLED = "decoupled"
    """Clip trainer / proximal, weight by proximal / behaviour (AReaL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSettings:
    """The knobs of `policy_loss`."""

    clip_low: float = 0.2
    """A ratio below 1 - clip_low earns nothing more on a negative advantage."""
    clip_high: float = 0.2
    """A ratio above 1 + clip_high earns nothing more on a positive advantage; DAPO's clip-higher uses 0.28."""
    kl_beta: float = 0.0
    """Weight of the k3 KL to the reference policy; 0 needs no reference log-probs."""
    correction: Correction = Correction.NONE
    max_importance_weight: float = 2.0
    """Upper bound of proximal / behaviour; read by `truncated` only."""

    def __post_init__(self) -> None:
        """Refuses values that have no meaning.

        Raises:
            ValueError: a clip range outside [0, 1) below or negative above, a negative beta, a bound not above 0.
        """
        if not 0.0 <= self.clip_low < 1.0 or self.clip_high < 0.0:
            raise ValueError("clip_low must lie in [0, 1) and clip_high must not be negative")
        if self.kl_beta < 0.0 or self.max_importance_weight <= 0.0:
            raise ValueError("kl_beta must not be negative and max_importance_weight must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossInputs:
    """Token-aligned tensors of one pack, each [N], in nats where log-probs."""

    trainer_logprobs: Tensor
    """Under the weights being trained; carries the gradient."""
    behavior_logprobs: Tensor
    """As recorded when sampled; over several policy versions where weights changed in flight."""
    advantages: Tensor
    segments: Tensor
    """int64[N], the sample of each token within the pack, for losses that reduce by sample."""
    proximal_logprobs: Tensor | None = None
    """Under the weights just before this optimiser step. None says that those are the current weights, which holds
    when each batch gets one optimiser step; then they are `trainer_logprobs` without the gradient, for free."""
    reference_logprobs: Tensor | None = None
    """Under the reference policy; required when `kl_beta` > 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossOutputs:
    """What a loss returns for one pack."""

    loss: Tensor
    """Scalar, summed over the N tokens."""
    sums: Mapping[str, Tensor]
    """Scalars without gradient, summed over the N tokens; reported divided by the number of tokens."""
    maxima: Mapping[str, Tensor]
    """Scalars without gradient; merged by maximum. Empty packs give none."""


LossFunction = Callable[[PolicyLossInputs], PolicyLossOutputs]


def policy_loss(inputs: PolicyLossInputs, *, settings: PolicyLossSettings) -> PolicyLossOutputs:
    """Clipped surrogate of GRPO / DAPO, with optional KL to a reference and off-policy correction.

    Per token, with A the advantage, r = exp(trainer - anchor) and w the (gradient-free) importance weight:
    `-w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_beta * k3`, where
    `none`: anchor = behaviour, w = 1; `decoupled`: anchor = proximal, w = exp(proximal - behaviour);
    `truncated`: the same with w cut at `max_importance_weight`.

    Reported sums: `loss`, `ratio` (trainer / behaviour), `clip_fraction`, `entropy` (minus the log-prob of the
    sampled token, an unbiased estimate on-policy), `mismatch_kl` (k3 estimate of KL(behaviour, trainer)),
    `importance_weight`, and `reference_kl` when there is one. Maximum: `ratio_max`.

    Raises:
        ValueError: `kl_beta` > 0 without `reference_logprobs`.

    Source: clipped surrogate: GRPO, DeepSeekMath (arXiv 2402.03300) eq. 3; k3 estimator: its eq. 4; asymmetric clip
    and token-level sum: DAPO (arXiv 2503.14476) eqs. 8 and 12; decoupled objective: AReaL (arXiv 2505.24298) eq. 5.
    Differences: the sum over tokens is divided by the step's tokens by the caller; GRPO's 1/|o_i| is not applied.
    """
    trainer = inputs.trainer_logprobs
    behavior = inputs.behavior_logprobs
    ratio_behavior = _ratio(trainer.detach(), behavior)
    if settings.correction is Correction.NONE:
        ratio = _ratio(trainer, behavior)
        weight = torch.ones_like(ratio_behavior)
    else:
        proximal = inputs.proximal_logprobs if inputs.proximal_logprobs is not None else trainer
        ratio = _ratio(trainer, proximal.detach())
        weight = _ratio(proximal.detach(), behavior)
        if settings.correction is Correction.TRUNCATED:
            weight = weight.clamp(max=settings.max_importance_weight)
    free = ratio * inputs.advantages
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * inputs.advantages
    loss = -(weight * torch.minimum(free, clipped)).sum()
    sums: dict[str, Tensor] = {}
    if settings.kl_beta > 0.0:
        if inputs.reference_logprobs is None:
            raise ValueError("kl_beta > 0 needs reference_logprobs")
        kl = k3_kl(trainer, inputs.reference_logprobs).sum()
        loss = loss + settings.kl_beta * kl
        sums["reference_kl"] = kl.detach()
    sums |= {
        "loss": loss.detach(),
        "ratio": ratio_behavior.sum(),
        "clip_fraction": (clipped < free).to(trainer.dtype).sum(),
        "entropy": -trainer.detach().sum(),
        "mismatch_kl": k3_kl(behavior, trainer.detach()).sum(),
        "importance_weight": weight.sum(),
    }
    maxima = {"ratio_max": ratio_behavior.max()} if ratio_behavior.numel() else {}
    return PolicyLossOutputs(loss=loss, sums=sums, maxima=maxima)


def k3_kl(sampled_logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(sampled, other): `exp(d) - d - 1`, d = other - sampled; never negative.

    Args:
        sampled_logprobs: [N], under the policy that the tokens were (about) sampled from.
        other_logprobs: [N], under the policy compared with it.

    Source: Schulman, "Approximating KL divergence" (2020), estimator k3; DeepSeekMath eq. 4.
    """
    difference = (other_logprobs - sampled_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(difference) - difference - 1.0


def _ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    return torch.exp((numerator_logprobs - denominator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
