"""Reports ended samples to a run, those of many callers at once; each caller waits until its own are reported."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from services.broker.records.token_tails import TailReport

REPORTS_AT_ONCE = 1_000
Tell = Callable[[Sequence[TailReport]], Awaitable[None]]


class EndReports:
    """See the module."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._waiting: deque[tuple[Sequence[TailReport], asyncio.Future[None]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def tell(self, reports: Sequence[TailReport]) -> None:
        """Returns once the run knows of these ends; raises what telling it raises."""
        if not reports:
            return
        reported: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((reports, reported))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        await reported

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._tell_some()
        finally:
            self._worker = None

    async def _tell_some(self) -> None:
        reports: list[TailReport] = []
        answers: list[asyncio.Future[None]] = []
        while self._waiting and len(reports) < REPORTS_AT_ONCE:
            some, reported = self._waiting.popleft()
            reports += some
            answers.append(reported)
        error: Exception | None = None
        try:
            await self._tell(reports)
        except Exception as failure:
            error = failure
        for reported in answers:
            if reported.done():
                continue
            if error is None:
                reported.set_result(None)
            else:
                reported.set_exception(error)
