"""Defines a run's section `environment`, and how it must fit the rest of the run."""

from __future__ import annotations

from pydantic import field_validator

from penstock.rewards.score_messages import THIRD_PARTY
from penstock.targets import checked_address
from services.generator.environments.config import EnvironmentLimits
from services.trainer.run_sections import LEAST_LEASE_SILENCE_S


class EnvironmentSection(EnvironmentLimits):
    """What samples talk with, turn by turn."""

    target: str
    """A Python class or function, module:Class, which this run serves in a process of its own, or the address of a
    server, grpc://HOST:PORT."""

    @field_validator("target")
    @classmethod
    def _names_an_environment(cls, value: str) -> str:
        if value.startswith(THIRD_PARTY):
            return THIRD_PARTY + checked_address(value.removeprefix(THIRD_PARTY))
        if not all(value.partition(":")):
            raise ValueError(f"{value!r}: write module:Class, or {THIRD_PARTY}HOST:PORT")
        return value

    @property
    def is_local(self) -> bool:
        """Whether this run serves it."""
        return not self.target.startswith(THIRD_PARTY)


def check_environment(
    section: EnvironmentSection,
    *,
    lease_silence_s: float | None,
    far: str,
    is_exposed: bool,
) -> None:
    """Raise ValueError for an environment that the rest of the run has no use for, or does not reach.

    Args:
        section: The environment.
        lease_silence_s: `trainer.max_lease_silence_s`, seconds.
        far: Who asks the environment from other machines; empty if none does.
        is_exposed: Whether one that is served here has an address of its own.
    """
    silence_s = lease_silence_s or LEAST_LEASE_SILENCE_S
    if section.step_timeout_s >= silence_s:
        raise ValueError(
            f"environment.step_timeout_s: {section.step_timeout_s:g} is not below trainer.max_lease_silence_s, "
            f"{silence_s:g}, after which the sample is leased again in the middle of its turn; lower it, or raise that"
        )
    if section.is_local and far and not is_exposed:
        raise ValueError(
            f"environment.target: {section.target} is served here at a free port of loopback, where {far} elsewhere "
            "cannot reach it; set listen.environment (and listen.public_host), or serve it by `penstock env serve` and "
            f"name {THIRD_PARTY}HOST:PORT"
        )
