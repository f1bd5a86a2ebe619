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
    """Maximum versions that a sample's oldest token may lag behind `policy_version`."""
    max_pack_tokens: int
    """Token budget of one forward pass."""
    algorithm: Algorithm
    """How rewards become advantages."""
    normalization: Normalization
    """Divisor of the gradient."""
    max_new_tokens: int = 1
    """Maximum completion tokens of sampling; read if `overlong_buffer_tokens` is set."""
    overlong_buffer_tokens: int = 0
    """The reward falls over this many last tokens; 0 penalises no length."""
    pass_reward: float = 1.0
    """A sample passes with this reward or more, in the report."""
    source_names: frozenset[str] = frozenset()
    """Sources that are reported by themselves; prompts of others may name any."""
    num_minibatches: int = 1
    """Optimiser steps per batch, each on different whole groups."""
    needs_proximal: bool = False
    """Whether these steps need the log-probs from before the first one, for a correction."""
    needs_reference: bool = False
    """Whether the loss' reference log-probs are computed as samples arrive, because gradients come later."""
    brings_reference: bool = False
    """Whether samples come with log-probs of the reference, from a scorer."""
    skip_zero_advantages: bool = True
    """Must be False if the loss has a term without advantages: a KL to a reference, a critic's loss."""
    reward_kl_coefficient: float = 0.0
    """Weight of the KL subtracted from the rewards; 0 if there is none, or if it is a term of the loss."""
    turn_discount: float | None = None
    """Credit goes to each turn of a session, later turns' rewards discounted by this; None gives it to the sample."""
    gae_lambda: float = 1.0
    """Lambda of a critic's advantages: 1 uses rewards alone, 0 its next value alone."""
    keeps_gaps: bool = False
    """Whether the step reports the log-prob gap of each token that it trains on."""


def is_reference_early(settings: AlgorithmConfig) -> bool:
    """Whether the loss' reference log-probs are computed as samples arrive, not in the gradient pass."""
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
        pass_reward=config.data.pass_reward,
        source_names=frozenset(source.name for source in config.data.train_sources if source.name),
        num_minibatches=settings.num_minibatches,
        needs_proximal=settings.num_minibatches > 1 and settings.correction != "none" and not algorithm.is_off_policy,
        needs_reference=settings.has_trainer_reference and is_reference_early(settings),
        brings_reference=settings.has_scorer,
        skip_zero_advantages=not algorithm.has_critic and (algorithm.is_kl_in_reward or settings.kl_coefficient == 0),
        reward_kl_coefficient=settings.kl_coefficient if algorithm.is_kl_in_reward else 0.0,
        turn_discount=settings.turn_discount,
        gae_lambda=settings.gae_lambda,
        keeps_gaps=config.gap_groups_per_step != 0,
    )
