"""TCP forwarders on loopback: one that records what it sees, one that speaks TLS in front of a server that cannot."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

from penstock.security import Security
from penstock.security.tls import server_context
from tests.helpers.proxies.links import Links, connected

CHUNK_BYTES = 64 * 1024
TLS_HANDSHAKE = 0x16
"""First byte of whoever begins to speak TLS."""


class Recorder:
    """Forwards to a port, and notes which secrets pass and how connections begin.

    Args:
        target: host:port on loopback.
        secrets: What is looked for, in both directions.
    """

    def __init__(self, target: str, secrets: Sequence[bytes]) -> None:
        self.port = 0
        self.seen: set[bytes] = set()
        """Secrets that passed in the clear."""
        self.first_bytes: list[int] = []
        """Of each connection, from the client."""
        self._target = target
        self._secrets = secrets

    @property
    def address(self) -> str:
        """Where it listens, host:port."""
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until both sides have ended it."""
        async with connected(int(self._target.rpartition(":")[2])) as (there, thither):
            await asyncio.gather(self._pass(reader, thither, is_client=True), self._pass(there, writer))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_client: bool = False
    ) -> None:
        longest = max(map(len, self._secrets), default=1)
        tail, is_first = b"", is_client
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if is_first:
                    self.first_bytes.append(data[0])
                    is_first = False
                window = tail + data
                self.seen.update(secret for secret in self._secrets if secret in window.lower())
                tail = window[-longest:]
                writer.write(data)
                await writer.drain()
        writer.close()


@contextmanager
def recording(targets: Mapping[str, str], secrets: Sequence[bytes]) -> Iterator[dict[str, Recorder]]:
    """A recorder for each address, by name, in a thread of their own. Secrets are of small letters."""
    recorders = {name: Recorder(target, secrets) for name, target in targets.items()}
    is_listening = threading.Event()
    stopping: list[Callable[[], None]] = []

    async def serve() -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        stopping.append(lambda: loop.call_soon_threadsafe(stopped.set))
        async with AsyncExitStack() as stack:
            for recorder in recorders.values():
                links = Links(recorder.serve)
                server = await asyncio.start_server(links.accept, "127.0.0.1", 0)
                recorder.port = server.sockets[0].getsockname()[1]
                stack.push_async_callback(links.close)
                await stack.enter_async_context(server)
            is_listening.set()
            await stopped.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    is_listening.wait(timeout=10)
    try:
        yield recorders
    finally:
        stopping[0]()
        thread.join(timeout=10)


@asynccontextmanager
async def tls_in_front_of(
    port: int, security: Security, *, moved: Mapping[int, int] | None = None
) -> AsyncIterator[int]:
    """A port that speaks mutual TLS and forwards to a plain one of loopback.

    `moved` maps ports that the server names in its answers to those that clients are to be told: of as many digits.
    """
    moved = moved if moved is not None else {}

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                for old, new in moved.items():
                    for before in (b"\r\n", b":"):
                        data = data.replace(b"%s%d\r\n" % (before, old), b"%s%d\r\n" % (before, new))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connected(port) as (there, thither):
            await asyncio.gather(pass_on(reader, thither), pass_on(there, writer))

    context = server_context(security.tls_files)
    assert isinstance(context, ssl.SSLContext)
    links = Links(link)
    async with await asyncio.start_server(links.accept, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]
        await links.close()
