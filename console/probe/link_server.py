"""Serves bounded transfers to `penstock probe --with` of other machines, over TLS as everything else.

GET  /probe/machine          who this is
GET  /probe/bytes?seconds=S  meaningless bytes for S seconds, MAX_BYTES at most
POST /probe/bytes            takes such bytes
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from pydantic import Field

from console.probe.probe_file import MachineName
from penstock.config import StrictModel
from penstock.network.http_server import listen_http
from penstock.security import Security
from penstock.security.http_access import Handler, HttpAccess
from penstock.security.roles import Role
from penstock.security.tls import server_context

MAX_BYTES = 128 << 20
"""Most bytes of one connection, each way."""
NUM_CONNECTIONS = 4
"""Of one measurement; more at once are refused."""
MAX_SECONDS = 10.0
PIECE = os.urandom(256 * 1024)
PREFIX = "/probe"
_SHUTDOWN_S = 1.0
_ROLES = (Role.ACCESS_ROLE_GENERATOR, Role.ACCESS_ROLE_TRAINER)


class Peer(StrictModel):
    """The machine that answers."""

    name: MachineName
    site: MachineName
    time_s: float | None = Field(default=None, ge=0, le=1e12)
    """Its clock as it answers, seconds since 1970."""


@asynccontextmanager
async def serving_transfers(listen: str, peer: Peer, *, security: Security) -> AsyncIterator[str]:
    """Serve until the context ends; yields the base address.

    Raises:
        PortUnavailableError: `listen` cannot be listened on.
        ConfigError: It must not be listened on without TLS.
    """
    access = HttpAccess(security)
    app = web.Application(middlewares=[access.middleware], client_max_size=MAX_BYTES)
    transfers = _Transfers(peer)
    routes: tuple[tuple[str, str, Handler], ...] = (
        ("GET", "machine", transfers.machine),
        ("GET", "bytes", transfers.send),
        ("POST", "bytes", transfers.receive),
    )
    for method, path, handler in routes:
        access.add(app, method, f"{PREFIX}/{path}", handler, roles=_ROLES)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    security.admit_listener(listen, setting="--listen")
    await runner.setup()
    try:
        yield await listen_http(runner, listen, setting="--listen", ssl_context=server_context(security.tls_files))
    finally:
        await runner.cleanup()


class _Transfers:
    """Those under way."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._free = asyncio.Semaphore(NUM_CONNECTIONS)

    async def machine(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response(self._peer.model_copy(update={"time_s": time.time()}).model_dump())

    async def send(self, request: web.Request) -> web.StreamResponse:
        try:
            seconds = min(MAX_SECONDS, float(request.query.get("seconds", "")))
        except ValueError as error:
            raise web.HTTPBadRequest(text="seconds: must be a number\n") from error
        self._check()
        async with self._free:
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            await response.prepare(request)
            loop = asyncio.get_running_loop()
            num_bytes, end_s = 0, loop.time() + seconds
            # A machine that stops reading must not keep others waiting; one that has enough closes its connection.
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(2 * MAX_SECONDS):
                    while num_bytes < MAX_BYTES and loop.time() < end_s:
                        await response.write(PIECE)
                        num_bytes += len(PIECE)
            return response

    async def receive(self, request: web.Request) -> web.StreamResponse:
        self._check()
        async with self._free:
            num_bytes = 0
            try:
                async with asyncio.timeout(2 * MAX_SECONDS):
                    async for piece in request.content.iter_any():
                        num_bytes += len(piece)
                        if num_bytes > MAX_BYTES:
                            raise web.HTTPRequestEntityTooLarge(MAX_BYTES, num_bytes)
            except TimeoutError as error:
                raise web.HTTPRequestTimeout(text=f"more than {2 * MAX_SECONDS:g} s\n") from error
            return web.json_response({"num_bytes": num_bytes})

    def _check(self) -> None:
        if self._free.locked():
            raise web.HTTPServiceUnavailable(text="another machine is measuring; try again in some seconds\n")
