"""An event loop whose time jumps: the services' own streams and timers run in it as fast as the machine allows.

Time stands still while anything can be done, and jumps to the next timer when nothing can. Whoever waits for something
outside of the loop (a Redis) says so with `waiting_outside`; meanwhile time stands still too, so that no timeout fires
because the machine was slow.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

REAL_WAIT_S = 5.0
START_S = 1_000_000.0


class NothingLeftError(Exception):
    """Every task waits for another and no timer runs: a deadlock."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. Also a `penstock.clock.Clock`."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._num_outside = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Seconds since the loop was made, jumps included."""
        return self._elapsed_s

    def now_s(self) -> float:
        """The same as seconds since some epoch."""
        return START_S + self._elapsed_s

    def monotonic_s(self) -> float:
        """The same as `time`."""
        return self._elapsed_s

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._elapsed_s += seconds

    @property
    def is_waiting_outside(self) -> bool:
        """Whether somebody waits for an answer from outside of the loop."""
        return self._num_outside > 0

    @contextmanager
    def waiting_outside(self) -> Iterator[None]:
        """Inside, time stands still."""
        self._num_outside += 1
        try:
            yield
        finally:
            self._num_outside -= 1

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """At once, in this thread: a thread of its own would take real time, while virtual time jumps."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shut_down(self) -> None:
        """Cancel what still runs, and close."""
        for task in asyncio.all_tasks(self):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                self.run_until_complete(task)
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready now; when nothing is, time jumps instead of passing."""
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self._loop.is_waiting_outside:
            return super().select(REAL_WAIT_S)
        if timeout is None:
            raise NothingLeftError("every task waits for another and no timer runs")
        self._loop.jump(timeout)
        return []
