"""Blocking HTTP connections to sources, and the threads that read from them."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTP_PORT, HTTPS_PORT, HTTPConnection, HTTPSConnection
from urllib.parse import urlsplit

from penstock.errors import ServiceUnavailableError
from penstock.security.tls import ClientContexts

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE = 8
MAX_IDLE_S = 15.0
"""Versions and their deltas follow each other closely; a router may drop connections that idle longer."""
NEAR_S, NEAR_BUFFER_BYTES = 0.002, 4 * 1024**2
"""A source that is connected to within NEAR_S gets a receive buffer of that size from the start, or what the system
allows: the kernel's own, which grows with what is read, costs a tenth more time (`docs/benchmarks.md`). Far ones keep
the kernel's, which may grow larger."""


def opened(connection: HTTPConnection) -> socket.socket:
    """The connection's socket; connects if it is not open. Raises OSError, or ValueError: no such name."""
    if (found := connection.sock) is None:
        begun_s = time.monotonic()
        connection.connect()
        found = connection.sock
        if time.monotonic() - begun_s < NEAR_S:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NEAR_BUFFER_BYTES)
    return found


class Connections:
    """Lends connections, and keeps idle ones between fetches; for the event loop's thread only.

    Args:
        tls: The authorities to trust and the certificate to show.
        headers: To be sent with each request.
        num_threads: Most connections read at once.
    """

    def __init__(self, *, tls: ClientContexts, headers: Mapping[str, str], num_threads: int) -> None:
        self.headers = headers
        # Threads of its own: they block for as long as a fetch takes, and must not delay other work.
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="fetch")
        self._tls = tls
        self._idle: list[_Idle] = []

    def take(self, url: str) -> HTTPConnection:
        """A connection for one thread, open or to be opened. Raises ServiceUnavailableError: no such address."""
        try:
            parts = urlsplit(url)
            for idle in [one for one in self._idle if one.origin == _origin(url)]:
                self._idle.remove(idle)
                if idle.is_usable():
                    return idle.connection
                idle.connection.close()
            return self._make(parts.scheme, parts.hostname or "", parts.port)
        except ValueError as error:
            raise ServiceUnavailableError(f"{url}: {error}") from error

    def give_back(self, url: str, connection: HTTPConnection) -> None:
        """Keep a connection for reuse, if it is open: its last answer was read to the end."""
        if connection.sock is not None:
            self._idle.append(_Idle(_origin(url), connection, time.monotonic()))
        for idle in self._idle[:-MAX_IDLE]:
            self._idle.remove(idle)
            idle.connection.close()

    def close(self) -> None:
        """Close idle connections, and let the threads end."""
        self.threads.shutdown(wait=False)
        while self._idle:
            self._idle.pop().connection.close()

    def _make(self, scheme: str, host: str, port: int | None) -> HTTPConnection:
        if scheme == "http":
            return HTTPConnection(host, port or HTTP_PORT, timeout=CONNECT_TIMEOUT_S)
        return HTTPSConnection(host, port or HTTPS_PORT, timeout=CONNECT_TIMEOUT_S, context=self._tls.current())


@dataclass(frozen=True, slots=True, eq=False)
class _Idle:
    origin: str
    connection: HTTPConnection
    since_s: float

    def is_usable(self) -> bool:
        """Whether nothing arrived meanwhile, the end of the connection included."""
        if time.monotonic() - self.since_s > MAX_IDLE_S:
            return False
        poll = select.poll()
        poll.register(self.connection.sock, select.POLLIN)
        return not poll.poll(0)


def _origin(url: str) -> str:
    """Scheme, host and port."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
