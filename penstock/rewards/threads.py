"""A bounded set of daemon threads for functions that may never return.

`concurrent.futures` joins its threads when the interpreter exits, so one hanging reward function would keep a process
from ending. Threads here are daemons: a call that hangs holds its thread, later calls wait for another one, and callers
bound that wait with their own deadline.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from penstock.rewards.outcomes import describe

_Result = TypeVar("_Result")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class DaemonThreads:
    """At most `max_threads` threads, started as they are needed."""

    def __init__(self, *, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    async def run(self, function: Callable[[], _Result]) -> _Result:
        """The function's result, or its error. Cancelling gives up waiting; a call that has begun runs on."""
        future: Future[_Result] = Future()
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_threads:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        # What the function logs belongs to the caller's service and trace.
        self._jobs.put((partial(copy_context().run, function), future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Let every idle thread end; hanging ones end with the process."""
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, future = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(_carried(error))
            self._idle.release()


def _carried(error: BaseException) -> Exception:
    # asyncio refuses to carry StopIteration, and SystemExit would end the process that serves all other callers.
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    carried = RuntimeError(describe(error))
    carried.__cause__ = error
    return carried
