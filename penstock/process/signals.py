"""Treats SIGTERM and SIGINT as one request to stop, however many arrive at once; only a later one forces it.

`timeout` signals the process and its group, a terminal signals everything in it, and people press Ctrl-C twice: signals
that come within FORCE_AFTER_S of the first are that same request.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

FORCE_AFTER_S = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context that takes the signals, in the main thread of a running event loop.

    If none came, the previous handlers are back at its end; else more of the same request change nothing until the
    process has ended.

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

    def __enter__(self) -> Self:
        # Not by the loop's own handlers: those end with the loop, and a second signal would kill what is about to exit.
        self._loop = asyncio.get_running_loop()
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        # A signal may reach another thread, which does not wake this one: the byte in the pipe does.
        self._loop.add_reader(self._pipe[0], os.read, self._pipe[0], 64)
        self._previous_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._take) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._force = None
        signal.set_wakeup_fd(self._previous_wakeup)
        self._loop.remove_reader(self._pipe[0])
        for end in self._pipe:
            os.close(end)
        if self._first_s is None:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        else:
            # Python restores the default actions of all but ignored signals before it tears down its modules.
            atexit.register(_ignore_signals)

    def _take(self, number: int, _frame: object) -> None:
        now_s = self._now_s()
        if self._first_s is None:
            self._first_s = now_s
            self._wake(self.requested.set)
        elif now_s - self._first_s >= FORCE_AFTER_S:
            if self._force is not None:
                self._wake(self._force)
            else:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

    def _wake(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # The loop is closed already, and the process about to end.
            self._loop.call_soon_threadsafe(call)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
