"""Finds samples that took much longer than others of their run: pure, no clock."""

from __future__ import annotations

SLOW_FACTOR = 5.0
"""A sample is slow if it took this many times the mean."""
MIN_SAMPLES = 64
"""Before so many were seen, none is slow."""
MEMORY = 1024
"""Samples over which the mean is taken, exponentially weighted."""


class SlowSamples:
    """The mean of a run's samples, as far as this process saw them."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._mean_s = 0.0

    def note(self, took_s: float) -> bool:
        """Count a sample that took so many seconds; whether it is slow by those before it."""
        is_slow = self._num_seen >= MIN_SAMPLES and took_s > SLOW_FACTOR * self._mean_s
        self._num_seen += 1
        self._mean_s += (took_s - self._mean_s) / min(self._num_seen, MEMORY)
        return is_slow
