"""Checks addresses that users type."""

from __future__ import annotations

from penstock.config import ConfigError
from penstock.targets import checked_address


def as_address(text: str) -> str:
    """The address, host:port. Raises ConfigError."""
    try:
        return checked_address(text)
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}") from error
