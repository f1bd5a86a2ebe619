"""Measures for how long sessions with an environment are in no slot of the engine, which plans have to know of them."""

from __future__ import annotations

import time
from collections.abc import Callable


class SessionWaits:
    """Adds up the waits of sessions that ended here; those that go on elsewhere do not count."""

    def __init__(self, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._since_s: dict[str, float] = {}
        self._waited_s: dict[str, float] = {}
        """Of sessions under way, by lease."""
        self.total_s, self.num_sessions = 0.0, 0

    def begin(self, lease_id: str) -> None:
        """A session left its slot."""
        self._since_s[lease_id] = self._monotonic_s()

    def end(self, lease_id: str) -> None:
        """It has what it waited for."""
        if (since_s := self._since_s.pop(lease_id, None)) is not None:
            self._waited_s[lease_id] = self._waited_s.get(lease_id, 0.0) + self._monotonic_s() - since_s

    def finish(self, lease_id: str) -> float:
        """It ended; returns for how long it waited."""
        self.end(lease_id)
        waited_s = self._waited_s.pop(lease_id, 0.0)
        self.total_s += waited_s
        self.num_sessions += 1
        return waited_s

    def forget(self, lease_id: str) -> None:
        """Its lease is over."""
        self._since_s.pop(lease_id, None)
        self._waited_s.pop(lease_id, None)
