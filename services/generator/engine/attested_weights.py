"""The version that this generator may serve: set after attestation, revoked when the engine's weights are in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedVersion:
    """An attested version."""

    policy_version: int
    """The version."""
    history: int
    """The run's history counter it belongs to."""
    digest: str
    """Digest of the engine's weights, read back from its memory."""
    instance_id: str = ""
    """The instance of the run that it belongs to; empty if its trainer did not say."""
    epoch: int = 0
    """The epoch of the trainer that published it."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: of two versions of one instance the newer is greater, whatever their numbers."""
        return self.epoch, self.history, self.policy_version


class AttestedWeights:
    """The engine's weights. Nothing may be leased while `is_trusted` is false.

    Args:
        on_change: Called when the version that may be served changes: the broker should hear of it at once.
    """

    def __init__(self, *, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._held: AttestedVersion | None = None
        self._is_trusted = False
        self._changed = asyncio.Condition()

    @property
    def current(self) -> AttestedVersion | None:
        """The last attested version; None before the first."""
        return self._held

    @property
    def is_trusted(self) -> bool:
        """Whether the engine is known to hold an attested version."""
        return self._is_trusted

    async def attest(self, held: AttestedVersion) -> None:
        """The engine proved that it holds this version."""
        self._held = held
        self._is_trusted = True
        async with self._changed:
            self._changed.notify_all()
        self._on_change()

    def distrust(self) -> None:
        """The engine failed to prove its weights: nothing starts until it has."""
        self._is_trusted = False
        self._on_change()

    async def wait_for(self, policy_version: int) -> None:
        """Wait until a trusted version of at least `policy_version` is held; the caller sets the deadline."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_trusted and self._held is not None and self._held.policy_version >= policy_version
            )
