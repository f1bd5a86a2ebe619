"""Notices an engine that owes tokens and brings none: a hung kernel or a stopped process raises no error by itself.

Pure: told what is the case, with a clock that never goes back.
"""

from __future__ import annotations


class DecodeWatch:
    """How long samples have been waited for without a single token sampled anywhere in the engine."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._since_s: float | None = None

    def silent_s(self, *, num_awaited: int, num_tokens: int, now_s: float) -> float:
        """Seconds since the last sign of life.

        Args:
            num_awaited: Samples whose next tokens are waited for; 0 also where the engine stands still on purpose.
            num_tokens: Tokens the engine has sampled since its start.
            now_s: Now.
        """
        if num_awaited == 0:
            self._since_s = None
            return 0.0
        if self._since_s is None or num_tokens != self._num_tokens:
            self._num_tokens, self._since_s = num_tokens, now_s
        return now_s - self._since_s
