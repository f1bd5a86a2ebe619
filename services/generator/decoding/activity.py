"""Counts the samples being decoded, leased and unleased, and provides the silence that some updates wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from penstock.process.busy_time import BusyTracker
from services.generator.metrics import GeneratorMetrics


class Decoding:
    """Counts samples, and holds new ones back while an update waits for silence.

    Args:
        busy: Called when a sample begins and ends.
        metrics: Exports the number of samples under way.
        on_change: Called when samples may begin again.
    """

    def __init__(self, busy: BusyTracker, metrics: GeneratorMetrics, on_change: Callable[[], None]) -> None:
        self._busy = busy
        self._metrics = metrics
        self._on_change = on_change
        self.num_awaited = 0
        """Samples whose next tokens the engine owes."""
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._is_silent = asyncio.Event()
        self._is_silent.set()

    @property
    def may_begin(self) -> bool:
        """Whether a sample may begin: no update waits for silence."""
        return self._may_begin.is_set()

    async def wait_until_may_begin(self) -> None:
        """Wait until a sample may begin; the caller sets the deadline."""
        await self._may_begin.wait()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Inside, one more sample is decoded."""
        self._metrics.running.inc()
        self._busy.begin()
        self._is_silent.clear()
        try:
            yield
        finally:
            self._metrics.running.dec()
            self._busy.end()
            if not self._busy.is_busy:
                self._is_silent.set()

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Inside, tokens are awaited; the engine counts as hung if none come for too long."""
        self.num_awaited += 1
        try:
            yield
        finally:
            self.num_awaited -= 1

    @contextmanager
    def not_awaiting(self) -> Iterator[None]:
        """Inside `awaiting`: something other than the engine is waited for."""
        self.num_awaited -= 1
        try:
            yield
        finally:
            self.num_awaited += 1

    @asynccontextmanager
    async def silence(self, *, timeout_s: float) -> AsyncIterator[None]:
        """Inside, no sample is decoded: those under way have finished and none begins. Raises TimeoutError."""
        self._may_begin.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_silent.wait()
            yield
        finally:
            self._may_begin.set()
            self._on_change()
