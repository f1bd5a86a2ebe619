"""Keeps the groups of the newest steps, to draw those that are trained on again.

Invariants:
- A step from version v draws from the `max_steps` steps before the newest, those that produced v - max_steps to v - 1:
  that bounds the age of a replayed sample, and the groups of the newest step need not have arrived yet.
- A draw names no group twice and is determined by those steps, the seed and the version: a repeated step draws the
  same, even after a crash.
- Steps undone by a rewind are forgotten when their replacements arrive.

Takes no clock and no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.trainer.batches.training_sample import TrainingSample

MIN_DEVIATION = 1e-6


@dataclass(frozen=True, slots=True)
class _Held:
    version: int
    """The version that its step produced."""
    samples: tuple[TrainingSample, ...]
    reward: float
    """Mean of its scored samples."""


class ReplayBuffer:
    """The groups of one run, by name.

    Args:
        max_steps: Steps whose groups can be drawn.
        seed: Seed of the draws.
    """

    def __init__(self, *, max_steps: int, seed: int) -> None:
        self._max_steps = max_steps
        self._seed = seed
        self._groups: dict[str, _Held] = {}

    def __len__(self) -> int:
        """Number of buffered groups."""
        return len(self._groups)

    def add(self, group_id: str, samples: Sequence[TrainingSample], *, policy_version: int) -> None:
        """A group was trained by the step that produced `policy_version`; unscored samples are left out."""
        scored = tuple(sample for sample in samples if sample.reward is not None)
        if scored:
            reward = float(np.mean([sample.reward for sample in scored]))
            self._groups[group_id] = _Held(policy_version, scored, reward)
        # One step more than a draw reaches back: the next draw may still be due.
        self._keep(lambda held: held.version >= policy_version - self._max_steps)

    def forget_from(self, policy_version: int) -> None:
        """Forget the steps that produced this version or a later one: the run was rewound."""
        self._keep(lambda held: held.version < policy_version)

    def forget(self, group_ids: Sequence[str]) -> None:
        """Do not draw these groups again."""
        self._groups = {name: held for name, held in self._groups.items() if name not in group_ids}

    def draw(self, num_groups: int, *, policy_version: int) -> list[list[TrainingSample]]:
        """At most `num_groups` groups for the step from `policy_version`: half of them recent ones, half good ones.

        The first half is drawn uniformly from the newest half of those steps, the others from all remaining groups with
        weights `exp((r - mean) / std)` of their mean rewards.

        Source: TBA (arXiv 2503.18929), which draws from its buffer either by recency or by reward. Difference: whole
        groups, and both in each batch.
        """
        rng = np.random.default_rng([self._seed, policy_version])
        oldest = policy_version - self._max_steps
        names = sorted(name for name, held in self._groups.items() if oldest <= held.version < policy_version)
        recent = _drawn(self._recent(names), (num_groups + 1) // 2, rng, weights=None)
        others = sorted(set(names) - set(recent))
        good = _drawn(others, num_groups - len(recent), rng, weights=self._weights(others))
        return [list(self._groups[name].samples) for name in [*recent, *good]]

    def _recent(self, names: Sequence[str]) -> list[str]:
        newest = max((self._groups[name].version for name in names), default=0)
        return [name for name in names if self._groups[name].version > newest - (self._max_steps + 1) // 2]

    def _weights(self, names: Sequence[str]) -> npt.NDArray[np.float64]:
        rewards = np.array([self._groups[name].reward for name in names], dtype=np.float64)
        if not rewards.size:
            return rewards
        scaled = (rewards - rewards.max()) / max(float(rewards.std()), MIN_DEVIATION)
        weights = np.exp(np.maximum(scaled, -50.0))
        shares: npt.NDArray[np.float64] = weights / weights.sum()
        return shares

    def _keep(self, is_kept: Callable[[_Held], bool]) -> None:
        self._groups = {name: held for name, held in self._groups.items() if is_kept(held)}


def _drawn(
    names: Sequence[str], count: int, rng: np.random.Generator, *, weights: npt.NDArray[np.float64] | None
) -> list[str]:
    if not names or count < 1:
        return []
    chosen = rng.choice(len(names), size=min(count, len(names)), replace=False, p=weights)
    return [names[index] for index in chosen.tolist()]
