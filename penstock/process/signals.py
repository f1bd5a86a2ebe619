"""Treats SIGTERM and SIGINT as one request to stop, however many arrive at once; only a later one forces it.

`timeout` signals the process and its group, a terminal signals everything in it, and people press Ctrl-C twice: signals
that come within FORCE_AFTER_S of the first are that same request.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

FORCE_AFTER_S = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Listens from `listen` to `ignore`, in the running event loop.

    Args:
        force: Called by a signal that arrives more than FORCE_AFTER_S after the first; without it the process ends
            by the signal's default action.
        now_s: Seconds of a clock that only runs forward.
    """

    def __init__(self, *, force: Callable[[], None] | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self.requested = asyncio.Event()
        """Set by the first signal."""
        self._force = force
        self._now_s = now_s
        self._first_s: float | None = None

    def listen(self) -> None:
        """Take both signals from now on."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take, number)

    def ignore(self) -> None:
        """Restore the previous handlers."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _take(self, number: signal.Signals) -> None:
        now_s = self._now_s()
        if self._first_s is None:
            self._first_s = now_s
            self.requested.set()
        elif now_s - self._first_s >= FORCE_AFTER_S:
            if self._force is not None:
                self._force()
            else:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
