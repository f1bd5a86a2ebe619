"""A connection to a server of the Model Context Protocol through its SDK: over stdio or streamable HTTP, with limits.

The SDK's contexts must be left by the task that entered them, so each connection has one task that holds it open.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client import Transport
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, INVALID_REQUEST, CallToolResult, Tool

from penstock.environments.imports.mcp_transports import MAX_MESSAGE_BYTES, BoundedTransport, program
from penstock.rewards.outcomes import describe

MAX_TOOLS = 128
MAX_PAGES = 16
MAX_SHOWN_CHARACTERS = 100
"""Of a command, in messages."""
CLOSE_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
"""Of a program's start, or the first contact with a server."""
_LOST = (CONNECTION_CLOSED, INVALID_REQUEST)
"""INVALID_REQUEST is also said of an HTTP session that the server no longer knows."""


class McpServerError(Exception):
    """The server broke the protocol, failed, or did not answer in time."""


class McpLostError(McpServerError):
    """The connection ended."""


class McpRefusedError(Exception):
    """The server calls the arguments of a call invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """A server: an address or a command."""

    url: str | None = None
    """Of its endpoint, http(s)://HOST:PORT/PATH."""
    command: Sequence[str] = ()
    """Program and arguments, started for each connection."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the program, beside those that the SDK passes on (HOME, PATH, USER and the like)."""
    token: str | None = field(default=None, repr=False)
    """Sent to `url` as a bearer token."""
    timeout_s: float = 60.0
    """Of each answer."""

    def __str__(self) -> str:
        return self.url or shlex.join(self.command)[-MAX_SHOWN_CHARACTERS:]


class McpConnection:
    """An open connection; `close` it."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether calls can be made, as far as is known."""
        return self._client is not None

    async def open(self) -> None:
        """Connect and agree on a version. Raises McpServerError."""
        is_open: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(is_open))
        done, _ = await asyncio.wait([is_open, self._task], timeout=START_TIMEOUT_S, return_when="FIRST_COMPLETED")
        if is_open in done:
            return
        reason = f"no answer in {START_TIMEOUT_S:g} s"
        if self._task in done:
            reason = "the connection ended" if (error := self._task.exception()) is None else _reason(error)
        await self.close()
        raise McpServerError(f"{self._server}: {reason}")

    async def tools(self) -> list[Tool]:
        """What the server offers, at most MAX_TOOLS. Raises McpServerError."""
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            try:
                page = await self._opened.list_tools(cursor=cursor)
            except Exception as error:  # the SDK and its transports raise much
                raise McpServerError(f"{self._server}: tools/list: {_reason(error)}") from error
            found += page.tools
            cursor = page.next_cursor
            if cursor is None or len(found) > MAX_TOOLS:
                break
        if cursor is not None or len(found) > MAX_TOOLS:
            raise McpServerError(f"{self._server}: tools/list: more than {MAX_TOOLS} tools, or {MAX_PAGES} pages")
        return found

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """The result of a tool, which may be an error of its own. Raises McpRefusedError, McpServerError."""
        client = self._opened
        try:
            return await client.call_tool(name, arguments, read_timeout_seconds=self._server.timeout_s)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise McpRefusedError(error.message) from error
            said = f"{self._server}: {name}: {error.message} ({error.code})"
            if error.code in _LOST:
                self._client = None
                raise McpLostError(said) from error
            raise McpServerError(said) from error
        except Exception as error:  # the SDK and its transports raise much
            raise McpServerError(f"{self._server}: {name}: {_reason(error)}") from error

    async def close(self) -> None:
        """End the connection, and the program if it is one's own."""
        self._ends.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            if not self._task.done():
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _opened(self) -> Client:
        if self._client is None:
            raise McpLostError(f"{self._server}: the connection is closed")
        return self._client

    async def _hold(self, is_open: asyncio.Future[None]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            transport = await _transport(self._server, stack)
            client = Client(transport, read_timeout_seconds=START_TIMEOUT_S, cache=None)
            try:
                self._client = await stack.enter_async_context(client)
                is_open.set_result(None)
                await self._ends.wait()
            finally:
                self._client = None


async def list_tools(server: McpServer) -> list[Tool]:
    """The tools of a server that is connected to for this alone. Raises McpServerError."""
    connection = McpConnection(server)
    await connection.open()
    try:
        return await connection.tools()
    finally:
        await connection.close()


async def _transport(server: McpServer, stack: contextlib.AsyncExitStack) -> Transport:
    if server.url is None:
        return program(server.command, {**get_default_environment(), **server.variables})
    headers = {} if server.token is None else {"Authorization": f"Bearer {server.token}"}
    http = httpx2.AsyncClient(
        headers=headers,
        timeout=httpx2.Timeout(server.timeout_s),
        transport=BoundedTransport(httpx2.AsyncHTTPTransport()),
    )
    await stack.enter_async_context(http)
    return streamable_http_client(server.url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES)


def _reason(error: BaseException) -> str:
    """The first cause, of a group of exceptions too."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe(error) if isinstance(error, Exception) else type(error).__name__
