"""Makes the packs of a whole optimiser step before the clock starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.trainer.recorded import Groups
from services.trainer.algorithms.dr_grpo import DR_GRPO
from services.trainer.batches.packing import Pack, pack_trajectories
from services.trainer.batches.training_sample import TrainingSample, trajectory_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The data of one optimiser step."""

    packs: list[Pack]
    """Samples that pass through the model: groups with equal rewards teach nothing and are left out."""
    num_samples: int
    """Samples of all groups."""
    num_loss_tokens: int
    """Loss tokens of all groups."""


def packed_batch(groups: Groups, *, max_pack_tokens: int) -> Batch:
    """The batch with the quick start's advantages: rewards minus their group's mean."""
    trajectories = [
        trajectory_of(sample, credit)
        for group in groups
        for sample, credit in zip(group, _credits(group), strict=True)
        if credit
    ]
    samples = [sample for group in groups for sample in group]
    return Batch(
        packs=pack_trajectories(trajectories, max_pack_tokens=max_pack_tokens),
        num_samples=len(samples),
        num_loss_tokens=sum(sample.completion_token_ids.size for sample in samples),
    )


def _credits(group: Sequence[TrainingSample]) -> list[float]:
    estimate = DR_GRPO.group_advantages
    assert estimate is not None
    credits: list[float] = estimate(np.array([sample.reward for sample in group], dtype=np.float64)).tolist()
    return credits
