"""Times a training run's stalls: seconds by cause for each step. The rest is computing, or between two causes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from penstock.clock import Clock


class Cause(StrEnum):
    """The cause of a stall; nothing is computed meanwhile."""

    SAMPLES = "samples"
    """Scored groups from the broker."""
    ACKNOWLEDGING = "acknowledging"
    """The broker's confirmation that a step's groups are done."""
    PUBLISHING = "publishing"
    """The previous publication, still being written, and the copy of the newest weights."""
    CHECKPOINTING = "checkpointing"
    """The part of a checkpoint that is not written in the background."""
    CRITIC = "critic"
    """A critic of its own: its values, and what its gradients and steps take longer than the trainer's."""


class StallTimer:
    """Adds up the waits between two steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(Cause, 0.0)
        self.on_wait: Callable[[Cause, float, float], None] = lambda cause, begin_s, end_s: None
        """Called with each wait that was timed here, by the monotonic clock."""

    @contextmanager
    def waiting(self, cause: Cause) -> Iterator[None]:
        """Counts the time within the context as a wait for `cause`."""
        begin_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            end_s = self._clock.monotonic_s()
            self._seconds[cause] += end_s - begin_s
            self.on_wait(cause, begin_s, end_s)

    def add(self, cause: Cause, seconds: float) -> None:
        """Counts a wait that was timed elsewhere."""
        self._seconds[cause] += seconds

    def take(self) -> Mapping[Cause, float]:
        """Seconds by cause since the last call, for every cause."""
        taken, self._seconds = self._seconds, dict.fromkeys(Cause, 0.0)
        return taken
