"""Answers questions in a few threads of its own, and the same question only once for all who ask at the same time.

The event loop does nothing but wait: reading and encoding happen in the threads, of which a run in this process has its
own. A question that finds too many others waiting is refused.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from console.page.files.values import Answer, whole
from console.page.run_data import RunData

NUM_THREADS = 2
MAX_WAITING = 64
KEPT_S = 1.0
"""How long an answer is reused."""
MAX_KEPT = 16
MAX_KEPT_BYTES = 4 * 1024 * 1024


class BusyError(Exception):
    """Too many questions wait."""


class Answers:
    """Of one server.

    Args:
        runs: Those that are shown, in order.
        is_live: Whether the runs go on in this process.
    """

    def __init__(self, runs: Sequence[RunData], *, is_live: bool) -> None:
        self._runs = runs
        self._is_live = is_live
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="page")
        self._under_way: dict[str, asyncio.Future[bytes]] = {}
        self._kept: dict[str, tuple[float, bytes]] = {}

    async def give(self, what: str, query: Mapping[str, str]) -> bytes:
        """The answer to `/api/WHAT?query` as JSON. Raises BadQuestionError, BusyError."""
        key = json.dumps([what, sorted(query.items())])
        kept_s, content = self._kept.get(key, (0.0, b""))
        if content and time.monotonic() - kept_s < KEPT_S:
            return content
        if (under_way := self._under_way.get(key)) is None:
            if len(self._under_way) >= MAX_WAITING:
                raise BusyError
            loop = asyncio.get_running_loop()
            under_way = loop.run_in_executor(self._threads, self.encoded, what, dict(query))
            self._under_way[key] = under_way
            under_way.add_done_callback(lambda done: self._take(key, done))
        return await asyncio.shield(under_way)

    def encoded(self, what: str, query: Mapping[str, str]) -> bytes:
        """The same, in the thread that calls. Raises BadQuestionError."""
        answer = self._runs_answer() if what == "runs" else self._run(query).answer(what, query)
        return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()

    def close(self) -> None:
        """Give up what waits; a question that is being answered ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _runs_answer(self) -> Answer:
        runs = [{"index": index, **run.facts()} for index, run in enumerate(self._runs)]
        return {"runs": runs, "live": self._is_live or any(run["state"] == "running" for run in runs)}

    def _run(self, query: Mapping[str, str]) -> RunData:
        return self._runs[whole(query, "run", 0, most=len(self._runs) - 1)]

    def _take(self, key: str, done: asyncio.Future[bytes]) -> None:
        del self._under_way[key]
        if done.cancelled() or done.exception() is not None:
            return
        now_s = time.monotonic()
        self._kept = {name: kept for name, kept in self._kept.items() if now_s - kept[0] < KEPT_S}
        if len(self._kept) < MAX_KEPT and len(done.result()) <= MAX_KEPT_BYTES:
            self._kept[key] = (now_s, done.result())
