"""The HTTP server of contents, at the trainer and at every relay: ranged GETs by role, TLS, bounded.

Promises:

- A content is looked up by run and name in what the process offers; no part of a request ever becomes a path.
- A content under way is served as far as it has arrived, then as it arrives; if it stops arriving the connection is
  closed, so that the receiver goes elsewhere.
- At most `max_requests` are served at once; further ones are answered 503. A receiver that reads nothing for
  SILENT_RECEIVER_S is dropped.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from penstock.errors import ServiceUnavailableError
from penstock.network.http_server import listen_http
from penstock.process.logger import get_logger
from penstock.security import Security
from penstock.security.http_access import HttpAccess
from penstock.security.roles import Role
from penstock.security.tls import server_context
from penstock.transfer.coding import CODING_HEADER, MAX_PLAIN_BYTES, ZSTD, encode_frame
from penstock.transfer.partial import PartialContent
from penstock.transfer.rate import ByteRate
from penstock.v1 import weights_pb2

MAX_REQUESTS = 256
SILENT_RECEIVER_S = 60.0
PIECE_BYTES = 256 * 1024
HTTP_SHUTDOWN_S = 2.0
_HTTP_OK, _HTTP_PARTIAL = 200, 206

Find = Callable[[str, str], Path | PartialContent | None]
"""Maps run id and content name to what is offered: a complete file, one under way, or nothing."""
_log = get_logger()


@asynccontextmanager
async def serving_contents(
    find: Find,
    *,
    listen: str,
    setting: str,
    security: Security,
    site: str = "",
    rate: ByteRate | None = None,
    max_requests: int = MAX_REQUESTS,
    on_served: Callable[[int], None] = lambda _num_bytes: None,
) -> AsyncIterator[str]:
    """Serve what `find` knows at /weights/{run_id}/{name}; yields the base address.

    Args:
        find: What is offered.
        listen: Address, host:port; port 0 is a free one.
        setting: Name of the setting that `listen` comes from, for the message of the error.
        security: The tokens that are accepted, and the certificate to show.
        site: The only site whose generators are served; empty: all.
        rate: Cap on what is sent; None for no cap.
        max_requests: Most requests served at once.
        on_served: Called with the number of bytes sent.

    Raises:
        PortUnavailableError: `listen` cannot be listened on.
        ConfigError: It must not be listened on without TLS.
    """
    handler = _ContentHandler(find=find, rate=rate, max_requests=max_requests, on_served=on_served)
    access = HttpAccess(security, site=site)
    app = web.Application(middlewares=[access.middleware])
    access.add(app, "GET", "/weights/{run_id}/{name}", handler.get, roles=[Role.ACCESS_ROLE_GENERATOR])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=HTTP_SHUTDOWN_S)
    security.admit_listener(listen, setting=setting)
    await runner.setup()
    try:
        yield await listen_http(runner, listen, setting=setting, ssl_context=server_context(security.tls_files))
    finally:
        await runner.cleanup()


@dataclass(kw_only=True)
class _ContentHandler:
    find: Find
    rate: ByteRate | None
    max_requests: int
    on_served: Callable[[int], None]
    num_requests: int = 0

    async def get(self, request: web.Request) -> web.StreamResponse:
        if self.num_requests >= self.max_requests:
            raise web.HTTPServiceUnavailable(text="too many requests at once\n", headers={"Retry-After": "1"})
        found = self.find(request.match_info["run_id"], request.match_info["name"])
        if found is None:
            raise _not_found()
        _limit_silence(request)
        if isinstance(found, PartialContent):
            return await self._stream(request, found.hold())
        if self.rate is not None or _is_coded(request):
            return await self._stream_file(request, found)
        return _CountedFile(found, self.on_served, self._counted)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def _stream_file(self, request: web.Request, path: Path) -> web.StreamResponse:
        try:
            size_bytes = (await asyncio.to_thread(path.stat)).st_size
            content = await PartialContent.whole(path, [weights_pb2.ChunkInfo(size_bytes=size_bytes)])
        except FileNotFoundError as error:
            raise _not_found() from error
        return await self._stream(request, content)

    async def _stream(self, request: web.Request, content: PartialContent) -> web.StreamResponse:
        with closing(content), self._counted():
            begin, end = _range(request, content.size_bytes)
            try:
                until = await content.available_until(begin)
            except ServiceUnavailableError as error:
                raise web.HTTPServiceUnavailable(text=f"{error}\n") from error
            is_coded = _is_coded(request)
            response = web.StreamResponse(
                status=_HTTP_PARTIAL,
                headers={
                    "Content-Type": "application/octet-stream",
                    "Content-Range": f"bytes {begin}-{end - 1}/{content.size_bytes}",
                    **({CODING_HEADER: ZSTD} if is_coded else {"Content-Length": str(end - begin)}),
                },
            )
            await response.prepare(request)
            try:
                await self._send(response, content, range(begin, end), until, is_coded=is_coded)
            except ServiceUnavailableError as error:
                _log.info("a content under way stands still", name=request.match_info["name"], error=str(error))
                if request.transport is not None:
                    request.transport.close()
            return response

    async def _send(
        self, response: web.StreamResponse, content: PartialContent, asked: range, until: int, *, is_coded: bool
    ) -> None:
        offset, most_bytes = asked.start, MAX_PLAIN_BYTES if is_coded else PIECE_BYTES
        while offset < asked.stop:
            if offset >= until:
                until = await content.available_until(offset)
            num_bytes = min(most_bytes, until - offset, asked.stop - offset)
            piece = await asyncio.to_thread(_read, content, offset, num_bytes, is_coded=is_coded)
            if self.rate is not None:
                await self.rate.take(len(piece))
            await response.write(piece)
            self.on_served(len(piece))
            offset += num_bytes


class _CountedFile(web.FileResponse):
    """Sent by the kernel, after the handler has returned; its bytes count once all are sent."""

    def __init__(
        self,
        path: Path,
        on_served: Callable[[int], None],
        counted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(path, headers={"Content-Type": "application/octet-stream"})
        self._on_served = on_served
        self._counted = counted

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._counted():
            writer = await super().prepare(request)
        if self.status in (_HTTP_OK, _HTTP_PARTIAL):
            self._on_served(self.content_length or 0)
        return writer


def _read(content: PartialContent, offset: int, num_bytes: int, *, is_coded: bool) -> bytes:
    plain = content.read(offset, num_bytes)
    if len(plain) != num_bytes:
        raise ServiceUnavailableError("the file ends before its content does")
    return encode_frame(plain) if is_coded else plain


def _is_coded(request: web.Request) -> bool:
    return request.headers.get(CODING_HEADER) == ZSTD


def _limit_silence(request: web.Request) -> None:
    """Let the kernel end the connection of a receiver that has stopped reading."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_RECEIVER_S * 1000))


def _not_found() -> web.HTTPNotFound:
    return web.HTTPNotFound(text="no such content here; ask for the newest manifest\n")


def _range(request: web.Request, size_bytes: int) -> tuple[int, int]:
    """First byte, and one past the last, of the requested range."""
    try:
        asked = request.http_range
    except ValueError as error:
        raise web.HTTPRequestRangeNotSatisfiable(text="Range: must be bytes=FIRST-LAST\n") from error
    begin = asked.start or 0
    end = min(size_bytes if asked.stop is None else asked.stop, size_bytes)
    if not 0 <= begin < end:
        raise web.HTTPRequestRangeNotSatisfiable(text=f"Range: the content has {size_bytes} bytes\n")
    return begin, end
