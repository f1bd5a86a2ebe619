"""Times a training run's stalls: seconds by cause for each step. The rest is computing, or between two causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from penstock.clock import Clock


class Cause(StrEnum):
    """The cause of a stall; nothing is computed meanwhile."""

    SAMPLES = "samples"
    """Scored groups from the broker."""
    ACKNOWLEDGING = "acknowledging"
    """The broker's word that a step's groups are done with."""
    PUBLISHING = "publishing"
    """The version before last, still on its way to the disk; and the copy of the newest."""
    CHECKPOINTING = "checkpointing"
    """A checkpoint, as far as it is not written beside training."""


class StallTimer:
    """Adds up waits between two steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(Cause, 0.0)

    @contextmanager
    def waiting(self, cause: Cause) -> Iterator[None]:
        """Whatever is done inside is a wait for `cause`."""
        begin_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self._seconds[cause] += self._clock.monotonic_s() - begin_s

    def take(self) -> Mapping[Cause, float]:
        """Seconds by cause since this was last called, every cause named."""
        taken, self._seconds = self._seconds, dict.fromkeys(Cause, 0.0)
        return taken
