"""Decides how soon an ended process is restarted: at once while failures are rare, with growing delays if not.

- Failures count within a sliding window: one failure a week never adds up.
- A process that fails too often within it, or that fails to start several times in a row, is paused: each pause is
  twice as long as the previous one, up to MOST_PAUSE_S, until it has been up for a whole window.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.network.rpc import backoff_s

WINDOW_S = 600.0
MAX_RESTARTS = 10
"""Most restarts within WINDOW_S."""
MAX_FAILED_STARTS = 3
"""Most consecutive starts without becoming ready."""
FIRST_PAUSE_S, MOST_PAUSE_S = 60.0, 1800.0
FIRST_DELAY_S, MOST_DELAY_S = 0.25, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """When to restart the process."""

    delay_s: float
    """Delay before the restart."""
    is_pause: bool
    """Whether the process is paused until then, rather than just restarted."""


class RestartBudget:
    """Restarts of one process; `now_s` returns seconds of a monotonic clock."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._ends_s: deque[float] = deque()
        self._num_failed_starts = 0
        self._num_pauses = 0
        self._delays_s = backoff_s(first_s=FIRST_DELAY_S, most_s=MOST_DELAY_S)

    def ended(self, *, up_s: float | None) -> Verdict:
        """Record an end after `up_s` seconds of being ready; None means it never was."""
        now_s = self._now_s()
        self._ends_s.append(now_s)
        while self._ends_s[0] <= now_s - WINDOW_S:
            self._ends_s.popleft()
        if up_s is None:
            self._num_failed_starts += 1
        else:
            self._num_failed_starts = 0
            self._delays_s = backoff_s(first_s=FIRST_DELAY_S, most_s=MOST_DELAY_S)
            if up_s >= WINDOW_S:
                self._num_pauses = 0
        if len(self._ends_s) <= MAX_RESTARTS and self._num_failed_starts < MAX_FAILED_STARTS:
            return Verdict(delay_s=next(self._delays_s), is_pause=False)
        pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_pauses, 16))
        self._num_pauses += 1
        return Verdict(delay_s=pause_s, is_pause=True)
