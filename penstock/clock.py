"""Time as a dependency: production uses the system clock, tests use one that they control."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now_s(self) -> float:
        """Seconds since the Unix epoch, for display: this clock may be stepped, and differs between machines."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment, for durations and deadlines: never stepped; valid on this machine only."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds since some moment before this process began."""
        return time.monotonic()


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = self._monotonic_s = start_s

    def now_s(self) -> float:
        """Seconds since the Unix epoch."""
        return self._now_s

    def monotonic_s(self) -> float:
        """Seconds since some moment."""
        return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Move forward; time never goes back."""
        if seconds < 0:
            raise ValueError(f"cannot go back in time by {seconds} s")
        self._now_s += seconds
        self._monotonic_s += seconds

    def set_wall(self, seconds: float) -> None:
        """Step the wall clock by this many seconds, either way, as NTP or an operator does; no time passes."""
        self._now_s += seconds
