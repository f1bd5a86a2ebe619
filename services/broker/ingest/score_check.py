"""Checks scores once on arrival, from any sender. Pure."""

from __future__ import annotations

import math

from penstock.errors import require
from penstock.v1 import types_pb2
from penstock.wire.codec import float32_array
from penstock.wire.score_rules import MAX_REWARD, details_problem, is_reward

MAX_COMPONENTS = 32
MAX_NAME_CHARACTERS = 64
"""Of a component, and of a reward model."""
MAX_MESSAGE_CHARACTERS = 1024
MAX_TURNS = 4096
_NOT_DROPPED = (types_pb2.SCORE_STATUS_UNSPECIFIED, types_pb2.SCORE_STATUS_OK)
DROP_REASONS: dict[int, str] = {
    status: f"reward_{name.removeprefix('SCORE_STATUS_').lower()}"
    for name, status in types_pb2.ScoreStatus.items()
    if status not in _NOT_DROPPED
}
"""Why a sample is dropped, by the status of its score: `reward_abstained` and so on."""


def check_score(score: types_pb2.Score) -> None:
    """Raise InvalidFieldError if a score is malformed."""
    is_ok = score.status == types_pb2.SCORE_STATUS_OK
    require(is_ok or score.status in DROP_REASONS, "score.status", score.status, "a known status")
    is_good = score.HasField("value") == is_ok and is_reward(score.value)
    expected = f"finite and at most {MAX_REWARD:g} in magnitude if the status is OK, and unset otherwise"
    require(is_good, "score.value", score.value, expected)
    is_good = len(score.components) <= MAX_COMPONENTS and all(map(math.isfinite, score.components.values()))
    require(is_good, "score.components", len(score.components), f"at most {MAX_COMPONENTS}, all finite")
    longest = max(map(len, score.components), default=0)
    _check_length("score.components", longest, MAX_NAME_CHARACTERS)
    problem = details_problem(score)
    require(problem is None, "score.details", len(score.details), problem or "")
    _check_length("score.model", len(score.model), MAX_NAME_CHARACTERS)
    _check_length("score.message", len(score.message), MAX_MESSAGE_CHARACTERS)

    require(
        len(score.turn_values) <= 4 * MAX_TURNS,
        "score.turn_values",
        len(score.turn_values) // 4,
        f"at most {MAX_TURNS}",
    )
    turns = float32_array(score.turn_values, "score.turn_values")
    require(all(map(math.isfinite, turns)), "score.turn_values", "NaN or infinity", "finite numbers")


def _check_length(field: str, num_characters: int, most: int) -> None:
    require(num_characters <= most, field, f"{num_characters} characters", f"at most {most} characters")
