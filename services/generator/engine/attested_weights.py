"""Which version this generator may serve: set after attestation, taken away when the engine's weights are in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An attested version."""

    policy_version: int
    """The version."""
    history: int
    """The run's history counter it belongs to."""
    digest: str
    """Digest of what the engine holds, read back from its memory."""
    instance_id: str = ""
    """Which run of this id it belongs to; empty where its trainer did not say."""
    epoch: int = 0
    """The epoch of the trainer that published it."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Of two versions of one instance the greater one is the newer, whatever their numbers."""
        return self.epoch, self.history, self.policy_version


class HeldWeights:
    """What the engine holds. Nothing may be leased while `is_trusted` is false.

    Args:
        on_change: Called when what may be served has changed: the broker should hear of it at once.
    """

    def __init__(self, *, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._held: Held | None = None
        self._is_trusted = False
        self._changed = asyncio.Condition()

    @property
    def current(self) -> Held | None:
        """The last attested version; None before the first."""
        return self._held

    @property
    def is_trusted(self) -> bool:
        """Whether the engine holds an attested version, as far as is known."""
        return self._is_trusted

    async def attest(self, held: Held) -> None:
        """The engine proved that it holds this version."""
        self._held = held
        self._is_trusted = True
        async with self._changed:
            self._changed.notify_all()
        self._on_change()

    def distrust(self) -> None:
        """The engine failed to prove what it holds: nothing is started until it has."""
        self._is_trusted = False
        self._on_change()

    async def wait_for(self, policy_version: int) -> None:
        """Wait until a trusted version of at least `policy_version` is held; the caller sets the deadline."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_trusted and self._held is not None and self._held.policy_version >= policy_version
            )
