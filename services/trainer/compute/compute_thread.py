"""The one thread in which PyTorch works, so that the event loop stays free for gRPC and HTTP.

Promises:

- Calls run one after the other, in the order they were made; a backend never sees two at once.
- A cancelled caller leaves no call running unnoticed: it ends only when its call has.
- A forward pass that has not begun when its `Interrupt` is set raises InterruptedComputeError instead: a stop waits for
  at most one pack, and for the remaining optimiser steps of a batch once the first of several has been taken.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from penstock.clock import Clock
from penstock.process.tasks import uninterrupted
from services.trainer.model.backend import BackendError

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class InterruptedComputeError(BackendError):
    """The run is being stopped; nothing of the pack was added."""


class ComputeThread:
    """Runs calls in its thread; listeners, `on_span` first, are called with the start and end of each.

    Both are by the monotonic clock.
    """

    def __init__(self, *, clock: Clock, on_span: Callable[[float, float], None]) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._clock = clock
        self.listeners = [on_span]
        self.busy_s = 0.0

    async def run(
        self, function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _Result:
        """`function(*args, **kwargs)` in the thread."""
        start_s = self._clock.monotonic_s()
        # With the caller's trace, for the lines that are logged there.
        call = partial(copy_context().run, partial(function, *args, **kwargs))
        try:
            return await uninterrupted(asyncio.get_running_loop().run_in_executor(self._executor, call))
        finally:
            end_s = self._clock.monotonic_s()
            self.busy_s += end_s - start_s
            for listener in self.listeners:
                listener(start_s, end_s)

    def close(self) -> None:
        """Let the thread end; nothing may be running."""
        self._executor.shutdown(wait=True, cancel_futures=True)


class Interrupt:
    """Stops forward passes from beginning: `set` from any thread, `check` before each pass."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Let no further forward pass begin."""
        self._event.set()

    def check(self) -> None:
        """Raises InterruptedComputeError once it is set."""
        if self._event.is_set():
            raise InterruptedComputeError("the run is being stopped")
