"""The loss of a pack: an algorithm's surrogate, weighted for staleness, with a KL term, and normalised.

Invariants:
- A loss is a *sum*. The optimiser step divides the accumulated gradient by `base.divisor` of the whole
  step, so microbatches of any split give the gradient of the whole batch although its totals are unknown until its end.
- Reported values are sums and maxima, so that they merge over microbatches without weighting.

Axes: N loss tokens of a pack, S samples of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from services.trainer.algorithms.base import Algorithm, Clip, Normalization, TokenTerms
from services.trainer.algorithms.terms.correction import Correction, CorrectionLevel, importance_weights
from services.trainer.algorithms.terms.kl import KlEstimator, estimated_kl
from services.trainer.algorithms.terms.ratios import bounded_exp, segment_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The settings that all algorithms have in common; their bounds are those of the configuration."""

    clip: Clip
    normalization: Normalization = Normalization.TOKENS
    max_new_tokens: int = 1
    """Maximum completion tokens of sampling; read by `MAX_TOKENS` only."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference policy; 0 needs no reference log-probs."""
    kl_estimator: KlEstimator = KlEstimator.K3
    correction: Correction = Correction.NONE
    correction_level: CorrectionLevel = CorrectionLevel.TOKEN
    max_importance_weight: float = 2.0
    """Bound of proximal / behaviour; read by `truncated` and `masked` only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Token-aligned tensors of one pack, each [N], in nats where log-probs."""

    trainer_logprobs: Tensor
    """Under the weights being trained; carries the gradient."""
    behavior_logprobs: Tensor
    """As recorded when sampled; from several policy versions if weights changed in flight."""
    advantages: Tensor
    segments: Tensor
    """int64[N], the sample of each token within the pack, counted from 0."""
    proximal_logprobs: Tensor | None = None
    """Under the weights before the batch's first optimiser step. None means that those are the current weights, as with
    one optimiser step per batch; then they are `trainer_logprobs` without the gradient, for free."""
    reference_logprobs: Tensor | None = None
    """Under the reference policy; required when `kl_coefficient` > 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """The loss of one pack."""

    loss: Tensor
    """Scalar: the sum over the pack, normalised except for the step's `divisor`."""
    sums: Mapping[str, Tensor]
    """Scalars without gradient, summed over the N tokens; reported divided by the number of tokens."""
    maxima: Mapping[str, Tensor]
    """Scalars without gradient; merged by maximum. Empty packs give none."""


LossFunction = Callable[[LossInputs], LossOutputs]


def policy_loss(inputs: LossInputs, *, algorithm: Algorithm, settings: LossSettings) -> LossOutputs:
    """`sum over tokens of scale * (w * surrogate + kl_coefficient * KL)`, or with the KL in the advantages.

    The anchor of the surrogate's ratios is the behaviour policy for correction `none` (then w = 1), else the proximal
    one, with w the importance weight of `correction.py`. `scale` and the step's divisor make the normalisation.

    Reported sums: `loss` (before normalisation), `ratio` (trainer / behaviour), `clip_fraction`, `entropy` (minus the
    log-prob of the sampled token, an unbiased estimate on-policy), `mismatch_kl` (k3 estimate of KL(behaviour,
    trainer)), `importance_weight`, and `reference_kl` when there is one. Maximum: `ratio_max`.

    Raises:
        ValueError: `kl_coefficient` > 0 without `reference_logprobs`.
    """
    trainer, behavior = inputs.trainer_logprobs, inputs.behavior_logprobs
    proximal = trainer.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs.detach()
    anchor = behavior if settings.correction is Correction.NONE else proximal
    weights = importance_weights(
        proximal,
        behavior,
        inputs.segments,
        correction=settings.correction,
        level=settings.correction_level,
        max_weight=settings.max_importance_weight,
    )
    kl = None if settings.kl_coefficient == 0.0 else _reference_kl(inputs, algorithm, settings)
    advantages = inputs.advantages
    if kl is not None and algorithm.is_kl_in_advantage:
        advantages = advantages - settings.kl_coefficient * kl
    terms = TokenTerms(logprobs=trainer, log_ratios=trainer - anchor, advantages=advantages, segments=inputs.segments)
    surrogate = algorithm.surrogate(terms, settings.clip)
    losses = weights * surrogate.losses
    ratios = bounded_exp(trainer.detach() - behavior)
    sums: dict[str, Tensor] = {}
    if kl is not None:
        if not algorithm.is_kl_in_advantage:
            losses = losses + settings.kl_coefficient * kl
        sums["reference_kl"] = kl.detach().sum()
    is_clipped = surrogate.is_clipped
    sums |= {
        "loss": losses.detach().sum(),
        "ratio": ratios.sum(),
        "clip_fraction": trainer.new_zeros(()) if is_clipped is None else is_clipped.to(trainer.dtype).sum(),
        "entropy": -trainer.detach().sum(),
        "mismatch_kl": estimated_kl(behavior, trainer.detach(), KlEstimator.K3).sum(),
        "importance_weight": weights.sum(),
    }
    maxima = {"ratio_max": ratios.max()} if ratios.numel() else {}
    return LossOutputs(loss=_scaled(losses, inputs.segments, settings).sum(), sums=sums, maxima=maxima)


def _reference_kl(inputs: LossInputs, algorithm: Algorithm, settings: LossSettings) -> Tensor:
    """Per token, [N]; with gradient where it is a term of the loss."""
    if inputs.reference_logprobs is None:
        raise ValueError("kl_coefficient > 0 needs reference_logprobs")
    if algorithm.is_kl_in_advantage:
        return estimated_kl(inputs.trainer_logprobs.detach(), inputs.reference_logprobs, KlEstimator.K1)
    return estimated_kl(inputs.trainer_logprobs, inputs.reference_logprobs, settings.kl_estimator)


def _scaled(losses: Tensor, segments: Tensor, settings: LossSettings) -> Tensor:
    if settings.normalization is Normalization.SAMPLES:
        return losses / segment_counts(segments, losses)[segments]
    if settings.normalization is Normalization.MAX_TOKENS:
        return losses / settings.max_new_tokens
    return losses
