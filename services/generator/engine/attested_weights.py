"""The version that this generator may serve: set after attestation, revoked when the engine's weights are in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.v1 import weights_pb2


class AttestedWeights:
    """The engine's weights. Nothing may be leased while `is_trusted` is false.

    Args:
        on_change: Called when the version that may be served changes: the broker should hear of it at once.
    """

    def __init__(self, *, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._held: weights_pb2.WeightsManifest | None = None
        self._is_trusted = False
        self._changed = asyncio.Condition()

    @property
    def current(self) -> weights_pb2.WeightsManifest | None:
        """The manifest of the last attested version; None before the first."""
        return self._held

    @property
    def is_trusted(self) -> bool:
        """Whether the engine is known to hold an attested version."""
        return self._is_trusted

    async def attest(self, held: weights_pb2.WeightsManifest) -> None:
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
