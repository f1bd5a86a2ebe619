"""Paces requests: bounds on concurrency and on requests a second, and the delay that the endpoint asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Pace:
    """Turns of one endpoint; times are those of the event loop, in seconds."""

    def __init__(self, *, max_concurrent: int, per_second: float | None) -> None:
        self._places = asyncio.Semaphore(max_concurrent)
        self._interval_s = 0.0 if per_second is None else 1.0 / per_second
        self._next_s = 0.0
        self._held_until_s = 0.0

    @property
    def held_s(self) -> float:
        """How much longer the endpoint asked to wait, seconds."""
        return max(0.0, self._held_until_s - asyncio.get_running_loop().time())

    def hold(self, for_s: float) -> None:
        """Begin no request for `for_s` seconds."""
        self._held_until_s = max(self._held_until_s, asyncio.get_running_loop().time() + for_s)

    @asynccontextmanager
    async def turn(self, *, deadline_s: float) -> AsyncIterator[None]:
        """Inside, one request may be under way. Raises TimeoutError when its turn does not come by `deadline_s`."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout_at(deadline_s):
            await self._places.acquire()
        try:
            while (wait_s := max(self._next_s, self._held_until_s) - loop.time()) > 0:
                if loop.time() + wait_s > deadline_s:
                    raise TimeoutError
                await asyncio.sleep(wait_s)
            self._next_s = max(self._next_s, loop.time()) + self._interval_s
            yield
        finally:
            self._places.release()
