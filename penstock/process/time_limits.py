"""Time limits for what happens thousands of times a second: they cost half of `asyncio.timeout`, or nearly nothing."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class TimeLimit:
    """A block that is cancelled after a time and then raises TimeoutError, as `asyncio.timeout`; used once."""

    __slots__ = ("_end_s", "_is_over", "_limit_s", "_num_cancelled", "_task", "_timer")

    def __init__(self, limit_s: float | None) -> None:
        """None sets no limit."""
        self._limit_s = limit_s
        self._is_over = False

    def __enter__(self) -> Self:
        """Start."""
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancelled = task, task.cancelling()
        self._timer: asyncio.Handle | None = None
        self._end_s = 0.0
        """When it rings: uvloop's handle of a time that has passed does not say."""
        self.reschedule(self._limit_s)
        return self

    def reschedule(self, limit_s: float | None) -> None:
        """Let the block end after this long from now; it must not be over."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if limit_s is not None:
            loop = asyncio.get_running_loop()
            self._end_s = loop.time() + limit_s
            self._timer = loop.call_at(self._end_s, self._end)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self._is_over

    @property
    def end_s(self) -> float | None:
        """When the time is up, in the loop's time."""
        return None if self._timer is None else self._end_s

    def _end(self) -> None:
        self._is_over = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Stop. Raises TimeoutError if the block was cancelled because its time was up, and for nothing else."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_over and self._task.uncancel() <= self._num_cancelled and kind is asyncio.CancelledError:
            raise TimeoutError from error


class Wake(asyncio.Event):
    """An event that one task waits for again and again, each time with a limit, and clears.

    Its timer stays set from one wait to the next, since nearly all end early.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turn: asyncio.Future[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_s = 0.0
        """When it rings."""
        self._due_s = 0.0

    def set(self) -> None:
        """Set it, and wake who waits."""
        super().set()
        self._end_turn()

    async def take_within(self, timeout_s: float) -> bool:
        """Wait until it is set, and clear it; False if it was not set in time. For one task at a time."""
        if not self.is_set():
            loop = asyncio.get_running_loop()
            self._turn = loop.create_future()
            self._due_s = loop.time() + timeout_s
            self._arm(loop)
            try:
                await self._turn
            finally:
                self._turn = None
        is_set = self.is_set()
        self.clear()
        return is_set

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None and self._timer_s <= self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = loop.call_at(self._due_s, self._expire), self._due_s

    def _expire(self) -> None:
        self._timer = None
        if self._turn is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due_s:
            self._arm(loop)
        else:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)
