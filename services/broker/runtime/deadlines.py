"""Time limits that stand still while a run's copy is loaded: how long that takes is a matter of the run's size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Deadlines:
    """The limits that are running."""

    def __init__(self) -> None:
        self._timeouts: dict[asyncio.Timeout, float] = {}
        """With what each has left, seconds, while they stand still."""
        self._is_paused = False

    @asynccontextmanager
    async def within(self, limit_s: float) -> AsyncIterator[None]:
        """Raises TimeoutError where what is inside takes longer, pauses left out."""
        async with asyncio.timeout(None if self._is_paused else limit_s) as timeout:
            self._timeouts[timeout] = limit_s
            try:
                yield
            finally:
                del self._timeouts[timeout]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, every limit stands still."""
        now_s = asyncio.get_running_loop().time
        self._is_paused = True
        for timeout in self._timeouts:
            end_s = timeout.when()
            if end_s is not None and not timeout.expired():
                self._timeouts[timeout] = end_s - now_s()
                timeout.reschedule(None)
        try:
            yield
        finally:
            self._is_paused = False
            for timeout, left_s in self._timeouts.items():
                if not timeout.expired():
                    timeout.reschedule(now_s() + left_s)
