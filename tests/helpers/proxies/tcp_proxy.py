"""A TCP link that can be cut, delayed, throttled, refused or flip bits, between a client and one server of loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.helpers.proxies.links import Links, connected

CHUNK_BYTES = 16 * 1024


class TcpProxy:
    """Forwards bytes to a port; its settings may change at any moment and hold for open connections too."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.delay_s = 0.0
        """Time that every piece waits, in each direction."""
        self.bytes_per_second: float | None = None
        """Most bytes forwarded a second and direction; None: no limit."""
        self.is_refusing = False
        """Whether new connections are closed at once."""
        self.flips_bits = False
        """Whether a bit of every piece that comes from the server is wrong."""
        self.num_connects = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._links = Links(self._link)

    @property
    def address(self) -> str:
        """Where it listens, host:port."""
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        """Listen on `port`, or on a free one."""
        self._server = await asyncio.start_server(self._links.accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut all and listen no more."""
        assert self._server is not None
        self._server.close()
        await self._links.close()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Reset every open connection; what is on the way is lost."""
        self._links.cut()

    def heal(self) -> None:
        """Forward as fast as it comes."""
        self.delay_s, self.bytes_per_second, self.is_refusing, self.flips_bits = 0.0, None, False, False

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connects += 1
        if self.is_refusing:
            writer.transport.abort()
            return
        async with connected(self.target_port) as (far_reader, far_writer):
            pumps = [
                asyncio.ensure_future(self._pump(reader, far_writer)),
                asyncio.ensure_future(self._pump(far_reader, writer, may_flip=True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in (writer, far_writer):
                    end.transport.abort()
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, may_flip: bool = False
    ) -> None:
        with suppress(OSError):
            while piece := await reader.read(CHUNK_BYTES):
                if may_flip and self.flips_bits:
                    piece = piece[:-1] + bytes((piece[-1] ^ 1,))
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.bytes_per_second:
                    await asyncio.sleep(len(piece) / self.bytes_per_second)
                writer.write(piece)
                await writer.drain()


@asynccontextmanager
async def proxy_to(port: int) -> AsyncIterator[TcpProxy]:
    """A running proxy."""
    proxy = TcpProxy(port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
