"""Pauses time limits while a run's copy is loaded, which takes longer the larger the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from penstock.errors import ServiceUnavailableError


class Deadlines:
    """The running limits of what `owner` names."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._timeouts: dict[asyncio.Timeout, float] = {}
        """The paused limits, each with its remaining seconds."""
        self._is_paused = False

    @asynccontextmanager
    async def within(self, limit_s: float) -> AsyncIterator[None]:
        """Raise ServiceUnavailableError if the block takes longer, pauses excluded."""
        try:
            async with asyncio.timeout(None if self._is_paused else limit_s) as timeout:
                self._timeouts[timeout] = limit_s
                try:
                    yield
                finally:
                    del self._timeouts[timeout]
        except TimeoutError as error:
            raise ServiceUnavailableError(f"{self._owner}: no answer in {limit_s} s") from error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause every limit inside the block."""
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
