"""Detects an engine that owes something and makes no progress: a hung kernel or a stopped process raises no error.

Pure: its inputs are observations and a monotonic clock.
"""

from __future__ import annotations


class DecodeWatch:
    """How long an engine has been awaited without progress: a token sampled, a tensor installed."""

    def __init__(self) -> None:
        self._signs: object = None
        self._since_s: float | None = None

    def silent_s(self, *, is_awaited: bool, signs: object, now_s: float) -> float:
        """Seconds since the last progress.

        Args:
            is_awaited: Whether tokens or an installation are awaited; false if the engine is paused on purpose.
            signs: Differs from before if the engine made progress.
            now_s: Now.
        """
        if not is_awaited:
            self._since_s = None
            return 0.0
        if self._since_s is None or signs != self._signs:
            self._signs, self._since_s = signs, now_s
        return now_s - self._since_s
