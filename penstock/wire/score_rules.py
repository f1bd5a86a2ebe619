"""What counts as a reward wherever one is made, passed on or stored. Pure."""

from __future__ import annotations

MAX_REWARD = 1e12
"""Training computes in float32, in which the squares of much larger ones are infinite: one such reward ends a run."""


def is_reward(value: float) -> bool:
    """Whether a number is a reward: finite, and at most MAX_REWARD in magnitude."""
    return -MAX_REWARD <= value <= MAX_REWARD
