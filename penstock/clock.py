"""Time as a dependency: production uses the system's, tests turn their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now_s(self) -> float:
        """Seconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()


class ManualClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds since the Unix epoch."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; time never goes back."""
        if seconds < 0:
            raise ValueError(f"cannot go back in time by {seconds} s")
        self._now_s += seconds
