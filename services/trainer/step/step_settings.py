"""Derives a step's settings from a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from services.trainer.algorithms.base import Algorithm, Normalization
from services.trainer.algorithms.config import AlgorithmConfig
from services.trainer.config import TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of a step."""

    policy_version: int
    """The version of the weights being trained."""
    max_staleness: int
    """Most versions a sample's oldest token may lag behind `policy_version`."""
    max_pack_tokens: int
    """Token budget of one forward pass."""
    algorithm: Algorithm
    """How rewards become advantages."""
    normalization: Normalization
    """Divisor of the gradient."""
    max_new_tokens: int = 1
    """Most completion tokens that sampling allows; read where `overlong_buffer_tokens` is set."""
    overlong_buffer_tokens: int = 0
    """The reward falls over this many of the last ones; 0 punishes no length."""
    num_minibatches: int = 1
    """Optimiser steps of a batch, each on whole groups of its own."""
    needs_proximal: bool = False
    """Whether several of them need the log-probs from before the first: a correction weighs them."""
    needs_reference: bool = False
    """Whether the loss' reference log-probs are computed as samples come, because gradients are only later."""
    skip_zero_advantages: bool = True
    """Must be False when the loss has a term without advantages: a KL to a reference, a critic's."""
    reward_kl_coefficient: float = 0.0
    """Weight of the KL that is taken off the rewards; 0 where there is none, or where it is a term of the loss."""
    gae_lambda: float = 1.0
    """Of advantages by a critic: 1 trusts rewards alone, 0 its next value alone."""


def is_reference_early(settings: AlgorithmConfig) -> bool:
    """Whether a reference in the loss is read as samples come, instead of in the pass that takes the gradient."""
    is_gradient_late = settings.num_minibatches > 1 or settings.definition.group_advantages is None
    return is_gradient_late and not settings.definition.is_kl_in_reward


def step_settings(config: TrainingConfig, *, policy_version: int) -> StepSettings:
    """A run's settings for the step from `policy_version`."""
    settings, algorithm = config.algorithm, config.algorithm.definition
    return StepSettings(
        policy_version=policy_version,
        max_staleness=settings.max_staleness,
        max_pack_tokens=config.trainer.tokens_per_pack,
        algorithm=algorithm,
        normalization=settings.normalization or algorithm.normalization,
        max_new_tokens=config.sampling.max_new_tokens,
        overlong_buffer_tokens=settings.overlong_buffer_tokens,
        num_minibatches=settings.num_minibatches,
        needs_proximal=settings.num_minibatches > 1 and settings.correction != "none" and not algorithm.is_off_policy,
        needs_reference=settings.kl_coefficient > 0 and is_reference_early(settings),
        skip_zero_advantages=not algorithm.has_critic and (algorithm.is_kl_in_reward or settings.kl_coefficient == 0),
        reward_kl_coefficient=settings.kl_coefficient if algorithm.is_kl_in_reward else 0.0,
        gae_lambda=settings.gae_lambda,
    )
