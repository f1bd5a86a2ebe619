"""What counts as a reward wherever one is made, passed on or stored. Pure."""

from __future__ import annotations

from penstock.v1 import types_pb2

ENVIRONMENT_WAIT_S = "environment_wait_s"
"""Detail of a session's score: for how long it was in no slot of an engine, seconds."""
MAX_REWARD = 1e12
"""Training computes in float32, in which the squares of much larger ones are infinite: one such reward ends a run."""


MAX_DETAILS = 16
MAX_DETAIL_NAME_CHARACTERS = 64
MAX_DETAIL_CHARACTERS = 256


def is_reward(value: float) -> bool:
    """Whether a number is a reward: finite, and at most MAX_REWARD in magnitude."""
    return -MAX_REWARD <= value <= MAX_REWARD


def details_problem(score: types_pb2.Score) -> str | None:
    """What is malformed in a score's details, or None."""
    if len(score.details) > MAX_DETAILS:
        return f"at most {MAX_DETAILS} details, got {len(score.details)}"
    if any(len(name) > MAX_DETAIL_NAME_CHARACTERS for name in score.details):
        return f"names of details must have at most {MAX_DETAIL_NAME_CHARACTERS} characters"
    if any(len(text) > MAX_DETAIL_CHARACTERS for text in score.details.values()):
        return f"details must have at most {MAX_DETAIL_CHARACTERS} characters"
    return None
