"""Time as a dependency: production uses the system's, tests turn their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now_s(self) -> float:
        """Seconds since the Unix epoch, for people: this clock may be set, and differs from other machines' clocks."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since some moment, for durations and deadlines: never set, and of this machine only."""
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
    """A clock that stands still until it is told to go on."""

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
        """Step the wall clock by so many seconds, either way, as NTP or a person does; no time passes."""
        self._now_s += seconds
