"""Decides, of work that was not sampled when it began, what is kept once it has ended: what failed or was slow.

Bounded: a budget of spans a second, and one mean for each kind of work. No clock: callers pass the time.
"""

from __future__ import annotations

from penstock.tracing.counters import LOST

SLOW_FACTOR = 5.0
"""Something is slow if it took this many times the mean."""
MIN_SEEN = 64
"""With fewer seen, none is slow."""
MEMORY = 1024
"""Pieces of work over which the mean is taken, exponentially weighted."""
TAIL_PER_S, MAX_TAIL = 20.0, 2000.0
"""Pieces of work kept because they failed or were slow: per second, and at once. A sample is 0.1 ms of a broker's
CPU and 1 kB or more of the run folder, where only the newest files are kept: a grader that fails every sample must not
push all else out."""


class SlowOnes:
    """The mean of one kind of work, as far as this process saw it."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._mean_s = 0.0

    def note(self, took_s: float) -> bool:
        """Count work that took `took_s` seconds; returns whether it is slow compared with earlier work."""
        is_slow = self._num_seen >= MIN_SEEN and took_s > SLOW_FACTOR * self._mean_s
        self._num_seen += 1
        self._mean_s += (took_s - self._mean_s) / min(self._num_seen, MEMORY)
        return is_slow


class TailBudget:
    """How much may still be kept; what it refuses is counted in `penstock_trace_spans_lost_total{at="budget"}`."""

    def __init__(self) -> None:
        self._left = MAX_TAIL
        self._at_s = 0.0

    def earn(self, now_s: float) -> None:
        """Time has passed, by a clock that may jump but is always the same one."""
        self._left = min(MAX_TAIL, self._left + max(0.0, now_s - self._at_s) * TAIL_PER_S)
        self._at_s = now_s

    def affords(self, number: int) -> bool:
        """Spend on `number` traces, if the budget allows."""
        if self._left < number:
            LOST.labels("budget").inc(number)
            return False
        self._left -= number
        return True
