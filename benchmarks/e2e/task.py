"""Defines the task of both sides: one model directory, one data file, one batch, one reward, one number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WINDOW_STEPS = 5
"""A training reward counts as reached when the mean of this many steps reaches it: a single step is noisy by 0.03."""
TARGET_REWARD = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The quick start's task, and how both sides train on it.

    The advantage is the reward minus its group's mean, the loss an average over all tokens of the step, the learning
    rate constant.
    """

    model_dir: Path
    """Hugging Face directory of the warm-started model."""
    train_path: Path
    """JSON lines of prompts and answers."""
    num_steps: int
    """Most optimiser steps."""
    until_reward: float | None
    """Training ends when the mean reward of WINDOW_STEPS steps reaches this; None takes all steps."""
    seed: int
    group_size: int = 8
    prompts_per_step: int = 32
    max_new_tokens: int = 256
    temperature: float = 1.0
    learning_rate: float = 4e-4
    max_grad_norm: float = 1.0

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimiser step."""
        return self.group_size * self.prompts_per_step
