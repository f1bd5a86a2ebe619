"""Runs one training of the convergence benchmark in this process: the trainer's own step on samples of a given lag."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.trainer.lagging import LaggingSampler, Score
from services.reward.models.exact_match import exact_match
from services.trainer.batches.packing import pack_trajectories
from services.trainer.batches.training_sample import TrainingSample, trajectory_of
from services.trainer.config import TrainingConfig
from services.trainer.model.backend import Backend
from services.trainer.run.context import Policy
from services.trainer.run.policy_loading import load_policy
from services.trainer.step.passes import LossItem, split
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import step_settings

PLAIN = "plain loop"
Groups = Sequence[Sequence[TrainingSample]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The varied settings."""

    lag: int
    """Age of every sample in versions, once there are that many."""
    correction: str
    """`algorithm.correction`, or PLAIN: a synchronous loop without the trainer's own step."""
    seed: int
    minibatches: int = 1
    """Optimiser steps per batch."""

    @property
    def name(self) -> str:
        """Its name in tables."""
        of = "" if self.minibatches == 1 else f", {self.minibatches} minibatches"
        return (PLAIN if self.correction == PLAIN else f"{self.lag}, {self.correction}") + of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """One step of a cell."""

    reward: float
    """Mean reward of the batch."""
    digest: str
    """Digest of all numbers of the batch, in order: equal digests mean bit-identical batches."""
    metrics: dict[str, float]
    """Metrics of the loss; empty for the plain loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    """Outcome of a cell."""

    cell: Cell
    steps: list[StepOutcome]
    held_out: float
    """Reward of one sample of each held-out prompt under the last weights."""

    def document(self) -> dict[str, object]:
        """The outcome as JSON values."""
        return asdict(self)


def run_cell(
    config: TrainingConfig,
    cell: Cell,
    *,
    on_step: Callable[[int, StepOutcome], None],
    score: Score = exact_match,
) -> CellOutcome:
    """Train, then measure; `config` is that of the cell's seed except for lag and correction."""
    config = _configured(config, cell)
    policy = load_policy(config)
    sampler = LaggingSampler(config, lag=cell.lag, score=score)
    outcomes: list[StepOutcome] = []
    take_step = _plain_step if cell.correction == PLAIN else _trainer_step
    for version in range(config.run.num_steps):
        sampler.note_version(version, policy.backend.state_tensors())
        groups = sampler.groups_at(version)
        metrics = take_step(policy, config, version, groups)
        outcomes.append(StepOutcome(reward=_mean_reward(groups), digest=digest_of(groups), metrics=metrics))
        on_step(version, outcomes[-1])
    held_out = sampler.held_out_reward(policy.backend.state_tensors())
    return CellOutcome(cell=cell, steps=outcomes, held_out=held_out)


def digest_of(groups: Groups) -> str:
    """SHA-256 over tokens, log-probs, versions and rewards of a batch."""
    digest = hashlib.sha256()
    for sample in (sample for group in groups for sample in group):
        digest.update(f"{sample.group_id}/{sample.sample_index}={sample.reward}".encode())
        for array in (
            sample.prompt_token_ids,
            sample.completion_token_ids,
            sample.behavior_logprobs,
            sample.policy_versions,
        ):
            digest.update(array.tobytes())
    return digest.hexdigest()


def _configured(config: TrainingConfig, cell: Cell) -> TrainingConfig:
    document = config.model_dump()
    document["run"]["seed"] = cell.seed
    document["algorithm"]["max_staleness"] = cell.lag
    document["algorithm"]["correction"] = "none" if cell.correction == PLAIN else cell.correction
    document["algorithm"]["allow_uncorrected"] = True
    document["algorithm"]["num_minibatches"] = cell.minibatches
    return TrainingConfig.model_validate(document)


def _trainer_step(policy: Policy, config: TrainingConfig, version: int, groups: Groups) -> dict[str, float]:
    step = TrainingStep(policy.backend, step_settings(config, policy_version=version))
    step.add_groups(groups)
    return step.finish().loss_metrics


def _plain_step(policy: Policy, config: TrainingConfig, version: int, groups: Groups) -> dict[str, float]:
    """Advantages, gradient, optimiser step: what `TrainingStep` does if nothing is late, malformed or left out."""
    backend: Backend = policy.backend
    assert config.algorithm.definition.group_advantages is not None
    items = []
    for group in groups:
        rewards = np.array([sample.reward for sample in group], dtype=np.float64)
        credits = config.algorithm.definition.group_advantages(rewards)
        items += [_loss_item(sample, credit) for sample, credit in zip(group, credits, strict=True)]
    num_minibatches = config.algorithm.num_minibatches
    for minibatch in [items] if num_minibatches == 1 else split(items, num_minibatches=num_minibatches):
        trajectories = [item.trajectory for item in minibatch if item.trajectory is not None]
        for pack in pack_trajectories(trajectories, max_pack_tokens=config.trainer.tokens_per_pack):
            backend.forward_backward(pack)
        backend.optimizer_step(divisor=sum(item.num_loss_tokens for item in minibatch))
    return {}


def _loss_item(sample: TrainingSample, credit: float) -> LossItem:
    trajectory = trajectory_of(sample, credit)
    return LossItem(
        group_id=sample.group_id,
        sample_index=sample.sample_index,
        num_tokens=trajectory.token_ids.size,
        num_loss_tokens=sample.completion_token_ids.size,
        # Samples with zero advantage have no gradient; leaving them out, as the trainer does, gives the same packs.
        trajectory=trajectory if credit else None,
    )


def _mean_reward(groups: Groups) -> float:
    return float(np.mean([sample.reward for group in groups for sample in group]))
