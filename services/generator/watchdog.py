"""Notices an engine that owes something and brings nothing: a hung kernel or a stopped process raises no error.

Pure: told what is the case, with a clock that never goes back.
"""

from __future__ import annotations


class DecodeWatch:
    """How long an engine has been waited for without a sign of life: a token sampled, a tensor installed."""

    def __init__(self) -> None:
        self._signs: object = None
        self._since_s: float | None = None

    def silent_s(self, *, is_awaited: bool, signs: object, now_s: float) -> float:
        """Seconds since the last sign of life.

        Args:
            is_awaited: Whether tokens or an installation are waited for; not where the engine stands still on purpose.
            signs: Differs from before where the engine got on.
            now_s: Now.
        """
        if not is_awaited:
            self._since_s = None
            return 0.0
        if self._since_s is None or signs != self._signs:
            self._signs, self._since_s = signs, now_s
        return now_s - self._since_s
