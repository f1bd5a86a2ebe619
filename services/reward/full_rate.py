"""Measures how fast a worker scores while it is as busy as it may be, which is what a plan has to know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

MIN_FULL_S = 10.0
"""Least time behind a rate: a burst of a second or two says little."""


class FullRate:
    """Counts what is scored while all calls are under way; the rest of the time the worker waits for samples.

    Args:
        num_calls: Most calls at once.
        monotonic_s: The time.
    """

    def __init__(self, *, num_calls: int, monotonic_s: Callable[[], float]) -> None:
        self._num_calls, self._monotonic_s = num_calls, monotonic_s
        self._num_active = 0
        self._since_s = 0.0
        """Since when all are under way, or the time was last counted."""
        self._full_s = 0.0
        self._num_samples = 0
        self.samples_per_second = 0.0
        """By the newest MIN_FULL_S or more; 0 before that."""

    @contextmanager
    def call(self, num_samples: int) -> Iterator[None]:
        """A call under way. What it scores counts if all are when it ends."""
        self._num_active += 1
        if self._num_active == self._num_calls:
            self._since_s = self._monotonic_s()
        try:
            yield
        finally:
            if self._num_active == self._num_calls:
                self._count(num_samples)
            self._num_active -= 1

    def skip(self) -> None:
        """Leave out the time since the last count: calls waited for their grader."""
        self._since_s = self._monotonic_s()

    def _count(self, num_samples: int) -> None:
        now_s = self._monotonic_s()
        self._full_s += now_s - self._since_s
        self._since_s = now_s
        self._num_samples += num_samples
        if self._full_s >= MIN_FULL_S:
            self.samples_per_second = self._num_samples / self._full_s
            self._full_s, self._num_samples = 0.0, 0
