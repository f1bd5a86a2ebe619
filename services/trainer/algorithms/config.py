"""The `algorithm` section of a run's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config import StrictModel
from penstock.storage.addresses import StoredPath
from services.trainer.algorithms.base import Algorithm, Normalization
from services.trainer.algorithms.registry import ALGORITHMS


def _known_algorithm(name: str) -> str:
    if name not in ALGORITHMS:
        raise ValueError(f"must be one of {', '.join(ALGORITHMS)}")
    return name


class AlgorithmConfig(StrictModel):
    """The training objective."""

    name: Annotated[str, AfterValidator(_known_algorithm)] = "grpo"
    """How advantages are computed, and how far the policy may move on them: services/trainer/algorithms."""
    normalization: Normalization | None = None
    """Averaging of the loss: tokens of the step, a sample's tokens and then samples, samples (sequences), or
    max_tokens and samples; the algorithm's own when unset."""
    group_size: int = Field(default=8, ge=1, le=1024)
    """Samples of one prompt that are trained on; 1 only with ppo and distill, which need no siblings."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts (groups) in one step: the batch that makes one policy version."""
    num_minibatches: int = Field(default=1, ge=1, le=1024)
    """Optimiser steps per batch, each on different whole groups: with 1, gradients are computed while samples arrive,
    but no ratio is ever clipped under a correction."""
    max_staleness: int = Field(default=1, ge=0, le=1000)
    """Maximum number of policy versions that a sample may lag; 0 is on-policy."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """Lower clip of the probability ratio: 1 - clip_low; the algorithm's own when unset."""
    clip_high: float | None = Field(default=None, gt=0, le=10)
    """Upper clip of the probability ratio: 1 + clip_high; the algorithm's own when unset."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference, the initial model or a teacher; 0 keeps no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How that KL is estimated from sampled tokens (Schulman)."""
    reference_refresh_steps: int = Field(default=0, ge=0)
    """Interval in steps at which the current weights become the reference of the KL; 0 keeps the initial model."""
    reference: Literal["trainer", "service"] = "trainer"
    """Where the KL's reference computes: in the trainer, or in scorers (`penstock serve scorer`), which lease finished
    samples from the broker and may be anywhere."""
    reference_path: StoredPath | None = None
    """For reference service: the Hugging Face directory of the scorers' model, which has the vocabulary of model.path;
    model.path when unset."""
    num_replayed_groups: int = Field(default=0, ge=0, le=100_000)
    """For tba: groups of earlier steps that each step trains on again, recent and well rewarded ones, from the steps
    that policy.num_retained_steps keeps."""
    turn_discount: float | None = Field(default=None, ge=0, le=1)
    """Credits each turn of a sample with what it earned, and with this much of what each later one did; for algorithms
    that compare a group, and ppo. When unset, one reward counts for all tokens of the sample."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """For ppo: 1 computes advantages from rewards alone, 0 from the critic's next value alone."""
    critic_learning_rate: float | None = Field(default=None, gt=0)
    """For ppo: peak learning rate of the critic; when unset optimizer.learning_rate, or up to ten times that as long as
    it stays below 1e-5."""
    critic: Literal["trainer", "service"] = "trainer"
    """For ppo: where the critic computes and learns: in the trainer, or in a process of its own (`penstock serve
    critic`), which may be anywhere."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """The reward falls linearly by up to 1 over this many last tokens of sampling.max_new_tokens (DAPO); 0 is off."""
    correction: Literal["none", "decoupled", "truncated", "masked"] = "truncated"
    """Correction for samples of older versions: none, importance weights (decoupled), weights cut at
    max_importance_weight (truncated), or tokens beyond it left out (masked)."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether each token is corrected on its own, or the completion as a whole."""
    max_importance_weight: float = Field(default=2.0, ge=1)
    """Bound of truncated and masked."""
    routing_replay: bool = False
    """For a mixture of experts: generators record the experts of each token, and training passes take those (R3). Costs
    layers x num_experts_per_tok bytes a token, twice that beyond 256 experts."""
    allow_uncorrected: bool = False
    """Allow correction none with max_staleness > 0: for comparisons."""

    @property
    def has_trainer_reference(self) -> bool:
        """Whether the trainer computes log-probs of the reference."""
        return self.kl_coefficient > 0 and self.reference == "trainer"

    @property
    def has_scorer(self) -> bool:
        """Whether samples come with log-probs of the reference."""
        return self.kl_coefficient > 0 and self.reference == "service"

    @property
    def has_trainer_critic(self) -> bool:
        """Whether the trainer trains a critic."""
        return self.definition.has_critic and self.critic == "trainer"

    @property
    def has_critic_service(self) -> bool:
        """Whether a critic of its own does."""
        return self.definition.has_critic and self.critic == "service"

    @property
    def definition(self) -> Algorithm:
        """The algorithm of that name."""
        return ALGORITHMS[self.name]
