"""Completion tokens per second, from the engine's running count."""

from __future__ import annotations

MIN_WINDOW_S = 1.0
"""Heartbeats may be 50 ms apart, and tokens come in bursts: a shorter window would show the bursts."""


class TokenRate:
    """The rate over the last window of at least MIN_WINDOW_S."""

    def __init__(self) -> None:
        self._mark_s: float | None = None
        self._mark_tokens = 0
        self.tokens_per_second = 0.0
        """The last rate; 0 before the first."""

    def update(self, num_tokens: int, now_s: float) -> float:
        """The rate, given the count of tokens since start and a monotonic clock, seconds."""
        if self._mark_s is None:
            self._mark_s, self._mark_tokens = now_s, num_tokens
        elif now_s - self._mark_s >= MIN_WINDOW_S:
            self.tokens_per_second = (num_tokens - self._mark_tokens) / (now_s - self._mark_s)
            self._mark_s, self._mark_tokens = now_s, num_tokens
        return self.tokens_per_second
