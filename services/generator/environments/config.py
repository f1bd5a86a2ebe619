"""Configuration of the environment that a generator's samples talk with."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from penstock.config import StrictModel
from penstock.environments.environment_messages import MAX_TURNS
from penstock.rewards.score_messages import THIRD_PARTY
from penstock.targets import checked_address


def _checked_target(value: str) -> str:
    return THIRD_PARTY + checked_address(value.removeprefix(THIRD_PARTY))


class EnvironmentLimits(StrictModel):
    """How long a session may last, and how many may wait."""

    max_turns: int = Field(default=64, ge=1, le=MAX_TURNS)
    """Most turns of a session; the environment may set fewer. A session that is not done then ends with what it earned,
    as one that reached its length does."""
    max_waiting: int = Field(default=256, ge=0, le=4096)
    """Sessions of a generator that may wait for the environment at once, beside those that it decodes: they take no
    slot of the engine."""
    step_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Longest time of one call; the sample is dropped as reward_timeout then. Less than trainer.max_lease_silence_s."""
    max_retries: int = Field(default=3, ge=0, le=20)
    """Further attempts of a turn that the environment answers with an error: its session is opened again, and the turns
    before are repeated. A call that took too long is not repeated."""
    max_error_share: float = Field(default=0.2, ge=0, le=1)
    """Above this share of errors among the last 64 answers that a generator got, samples wait instead of being
    dropped."""


class EnvironmentConfig(EnvironmentLimits):
    """The environment and its limits."""

    target: Annotated[str, AfterValidator(_checked_target)]
    """Its server, grpc://HOST:PORT."""
