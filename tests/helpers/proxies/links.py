"""Connections that a test's own server accepted: none of them, and none made for them, outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Links:
    """Serves each connection in a task of its own, which closes it at its end, and resets it where it is cut short.

    Args:
        serve: Serves one connection until either side ends it; an OSError ends it as well.
    """

    def __init__(self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._serve = serve
        self._writers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What `asyncio.start_server` calls. Not a coroutine: one that is cancelled before it starts closes nothing."""
        task = asyncio.ensure_future(self._serve_one(reader, writer))
        self._writers[task] = writer
        task.add_done_callback(self._end)

    def cut(self) -> None:
        """Reset all that were accepted."""
        for writer in self._writers.values():
            writer.transport.abort()

    async def close(self) -> None:
        """Reset all and wait until their sockets are closed."""
        tasks = list(self._writers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # The loop closes what was reset in its next round.

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await self._serve(reader, writer)
            writer.close()
            await writer.wait_closed()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._writers.pop(task).transport.abort()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Link]:
    """A connection to a port of loopback: closed at the end, reset by an error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
        writer.close()
        await writer.wait_closed()
    finally:
        writer.transport.abort()
