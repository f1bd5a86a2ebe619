"""Computes learning curves and two numbers derived from them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.e2e.task import TARGET_REWARD, WINDOW_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimiser step."""

    time_s: float
    """When it was taken, in Unix time."""
    reward: float
    """Mean training reward of its samples."""
    num_samples: int
    num_tokens: int
    """Completion tokens of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One training run: loading, evaluation and process start come before `begin_s`."""

    begin_s: float
    """When training began, in Unix time: prompts may be sampled from then on."""
    steps: Sequence[Step]
    """Oldest first."""

    @property
    def samples_per_second(self) -> float:
        """Trained samples per second, from the first step to the last; needs two steps.

        The first is left out: it includes one-time costs (first touches of memory, filling the pipeline).
        """
        return sum(step.num_samples for step in self.steps[1:]) / self._steady_s

    @property
    def tokens_per_second(self) -> float:
        """Trained completion tokens per second, likewise."""
        return sum(step.num_tokens for step in self.steps[1:]) / self._steady_s

    @property
    def _steady_s(self) -> float:
        if len(self.steps) < 2:
            raise ValueError("a rate needs at least two steps")
        return self.steps[-1].time_s - self.steps[0].time_s

    def steps_to_reward(self, target: float = TARGET_REWARD, *, window_steps: int = WINDOW_STEPS) -> int | None:
        """Steps after which the mean reward of `window_steps` steps reached `target`; None if it never did."""
        rewards = [step.reward for step in self.steps]
        for end in range(window_steps, len(rewards) + 1):
            if sum(rewards[end - window_steps : end]) / window_steps >= target:
                return end
        return None

    def seconds_to_reward(self, target: float = TARGET_REWARD, *, window_steps: int = WINDOW_STEPS) -> float | None:
        """Seconds from the start until then."""
        num_steps = self.steps_to_reward(target, window_steps=window_steps)
        return None if num_steps is None else self.steps[num_steps - 1].time_s - self.begin_s
