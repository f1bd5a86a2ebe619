"""Emulates a link of given rate and delay before a loopback port; it counts the bytes that cross it and can be cut.

All connections share its rate, which the delay does not lower.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

PIECE_BYTES = 16 * 1024
LATENESS_S = 0.02
"""Time lost to a busy machine's clock that is made up for."""
MAX_ON_THE_WAY = 4096
"""Pieces of one connection and direction."""


class ShapedLink:
    """Forwards to `target_port`; shapes and counts the replies."""

    def __init__(self, target_port: int, *, bytes_per_second: float, delay_s: float = 0.0) -> None:
        self.target_port = target_port
        self.bytes_per_second = bytes_per_second
        self.delay_s = delay_s
        self.delivered_bytes = 0
        """Bytes that reached the near side, headers included."""
        self.num_connects = 0
        self.is_open = asyncio.Event()
        """While not set, nothing moves, without any notice."""
        self.port = 0
        self._free_at_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Reset every connection; bytes in flight are lost."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connects += 1
        self._writers.add(writer)
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._request(reader, far_writer))
                pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_ON_THE_WAY)
                group.create_task(self._enter(far_reader, pieces))
                group.create_task(self._leave(pieces, writer))
        except* (OSError, asyncio.CancelledError, EOFError):
            pass
        finally:
            for end in (writer, far_writer):
                if end is not None:
                    end.transport.abort()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE_BYTES):
            await asyncio.sleep(self.delay_s)
            writer.write(piece)
        raise EOFError

    async def _enter(self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        while piece := await reader.read(PIECE_BYTES):
            await self.is_open.wait()
            self._free_at_s = max(self._free_at_s, loop.time() - LATENESS_S) + len(piece) / self.bytes_per_second
            entered_s = self._free_at_s
            await asyncio.sleep(entered_s - loop.time())
            await pieces.put((entered_s + self.delay_s, piece))
        await pieces.put((loop.time(), b""))

    async def _leave(self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while (due := await pieces.get())[1]:
            await asyncio.sleep(due[0] - loop.time())
            await self.is_open.wait()
            if writer.is_closing():
                break
            writer.write(due[1])
            self.delivered_bytes += len(due[1])
            await writer.drain()
        raise EOFError


@asynccontextmanager
async def link_to(port: int, *, bytes_per_second: float = 1e9, delay_s: float = 0.0) -> AsyncIterator[ShapedLink]:
    """A running link."""
    link = ShapedLink(port, bytes_per_second=bytes_per_second, delay_s=delay_s)
    link.is_open.set()
    server = await asyncio.start_server(link._connect, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
        for task in link._tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*link._tasks, return_exceptions=True)
        await server.wait_closed()
