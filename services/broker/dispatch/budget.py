"""How long a look ahead may take, and how it gives way to the thread that serves meanwhile."""

from __future__ import annotations

import math
import time

SLICE_S = 0.002
"""Of work between two pauses, where nothing else makes the interpreter change threads."""
PAUSE_S = 0.0002


class TooLateError(Exception):
    """A look ahead took longer than it may."""


class Budget:
    """Time for one look ahead, in a thread beside the event loop.

    Args:
        limit_s: None for as long as it takes, and without pauses.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._end_s = math.inf if limit_s is None else time.monotonic() + limit_s
        self._pause_s = math.inf if limit_s is None else time.monotonic() + SLICE_S

    def check(self) -> None:
        """Give way now and then. Raises TooLateError."""
        if self._end_s == math.inf:
            return
        now_s = time.monotonic()
        if now_s >= self._end_s:
            raise TooLateError
        if now_s >= self._pause_s:
            time.sleep(PAUSE_S)
            self._pause_s = time.monotonic() + SLICE_S


UNLIMITED = Budget()
