"""Reads neighbouring chunks of a content by one ranged GET: with blocking calls, in a thread of its own.

    ask -> answer checked -> piece read, hashed, written -> ... -> chunk proved -> next one

One thread does all the work on a piece at once, without the event loop: the bytes are still in the processor's cache,
and nothing is handed between threads. This takes less time than an asynchronous client needs merely to receive the
bytes (`docs/benchmarks.md`), and arriving weights do not delay the event loop.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TypeAlias
from urllib.parse import urlsplit

from penstock.errors import ServiceUnavailableError, UnknownVersionError
from penstock.transfer.coding import CODING_HEADER, ZSTD, read_frame
from penstock.transfer.connections import opened
from penstock.transfer.partial import Landing
from penstock.transfer.rate import ByteRate

PIECE_BYTES = 256 * 1024
"""Most bytes per read: few enough for a core's own cache."""

_HTTP_OK, _HTTP_PARTIAL, _HTTP_NOT_FOUND, _HTTP_GONE = 200, 206, 404, 410
_Piece: TypeAlias = bytes | memoryview
_BROKEN = (OSError, HTTPException, ValueError)
"""What a broken source raises. ValueError: an address or a header that cannot be sent, a number that is none."""


@dataclass(kw_only=True)
class SpanRead:
    """One GET; `run` it once, in a thread."""

    connection: HTTPConnection
    """Used exclusively; closed unless `run` returns."""
    url: str
    """Of the content."""
    headers: Mapping[str, str]
    """Sent with the request, beside the range."""
    silence_s: float
    """How long the source may stay silent."""
    rate: ByteRate
    """Cap on the rate of receipt."""
    on_received: Callable[[int], None]
    """Called with the number of bytes received, in the thread."""
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _socket: socket.socket | None = field(default=None, init=False)

    def run(self, landings: Mapping[int, Landing], *, size_bytes: int, on_chunk: Callable[[int], object]) -> None:
        """Bring neighbouring chunks into the file.

        Args:
            landings: Chunks by index, in order; part of the first one may be present.
            size_bytes: Of the whole content.
            on_chunk: Called, in the thread, for each verified chunk.

        Raises:
            DigestMismatchError: A chunk's digest is wrong; fetch it again.
            UnknownVersionError: The source does not have the content.
            ServiceUnavailableError: Disconnected, silent, not an answer to the request, or `stop` was called.
            OSError: The file cannot be written.
        """
        try:
            chunks = list(landings.values())
            end = chunks[-1].begin + chunks[-1].missing_bytes
            response = self._ask(chunks[0].begin, end, size_bytes)
            body = _Body(response)
            for index, landing in landings.items():
                self._land(body, landing)
                landing.check()
                on_chunk(index)
            self._finish(response)
        except BaseException:
            self.connection.close()
            raise

    def stop(self) -> None:
        """Make `run` end soon, from another thread: at once, unless it is still connecting."""
        self._stopped.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _ask(self, begin: int, end: int, size_bytes: int) -> HTTPResponse:
        parts = urlsplit(self.url)
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        try:
            self._socket = opened(self.connection)
            self._raise_if_stopped()
            self._socket.settimeout(self.silence_s)
            self.connection.request("GET", path, headers={**self.headers, "Range": f"bytes={begin}-{end - 1}"})
            response = self.connection.getresponse()
        except _BROKEN as error:
            raise self._unavailable(error) from error
        self._check_answer(response, begin, end, size_bytes)
        return response

    def _check_answer(self, response: HTTPResponse, begin: int, end: int, size_bytes: int) -> None:
        if response.status in (_HTTP_NOT_FOUND, _HTTP_GONE):
            raise UnknownVersionError(f"{self.url}: the content is not there (any more)")
        if response.status == _HTTP_OK and (begin, end) == (0, size_bytes):
            return
        if response.status != _HTTP_PARTIAL:
            raise ServiceUnavailableError(f"{self.url}: answered HTTP {response.status} to a ranged GET")
        content_range = response.headers.get("Content-Range", "")
        if not content_range.startswith(f"bytes {begin}-{end - 1}/"):
            raise ServiceUnavailableError(f"{self.url}: sent range {content_range!r:.80}, asked for {begin}-{end - 1}")

    def _land(self, body: _Body, landing: Landing) -> None:
        while landing.missing_bytes:
            try:
                piece, came_bytes = body.next(landing.missing_bytes)
            except _BROKEN as error:
                raise self._unavailable(error) from error
            # What is read after that may be left over in the kernel, and another thread may open the file.
            self._raise_if_stopped()
            landing.add(piece)
            self.on_received(came_bytes)
            if delay_s := self.rate.delay_s(came_bytes):
                self._stopped.wait(delay_s)

    def _finish(self, response: HTTPResponse) -> None:
        """Leave the connection ready for the next request, where the answer ends with the last chunk."""
        is_at_end = False
        with contextlib.suppress(OSError, HTTPException, ValueError):
            is_at_end = not response.will_close and not response.read1(1)
        response.close()
        if not is_at_end:
            self.connection.close()

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise ServiceUnavailableError("the fetch was given up")

    def _unavailable(self, error: Exception) -> ServiceUnavailableError:
        return ServiceUnavailableError(f"{self.url}: {type(error).__name__}: {error}")


class _Body:
    """An answer's body in the pieces it arrived or was compressed in, cut at the end of a chunk."""

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self._is_coded = response.headers.get(CODING_HEADER) == ZSTD
        self._rest = memoryview(b"")

    def next(self, max_bytes: int) -> tuple[_Piece, int]:
        """The next bytes, at most `max_bytes`, and the number received over the network for them.

        Raises:
            ServiceUnavailableError: The body ended, or is not coded as stated.
            OSError, HTTPException, ValueError: The connection broke off.
        """
        if not self._is_coded:
            if plain := self._response.read1(min(max_bytes, PIECE_BYTES)):
                return plain, len(plain)
            raise ServiceUnavailableError("the source broke off")
        came_bytes = 0
        if not self._rest:
            plain, came_bytes = read_frame(self._response)
            self._rest = memoryview(plain)
        piece, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return piece, came_bytes
