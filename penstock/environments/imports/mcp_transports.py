"""Transports under the SDK of the Model Context Protocol that bound what a server may send at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
GRACE_S = 2.0
"""For a program to end by itself once its input has ended."""

_Messages = MemoryObjectReceiveStream[SessionMessage | Exception]


@contextlib.asynccontextmanager
async def program(
    command: Sequence[str], variables: Mapping[str, str]
) -> AsyncGenerator[tuple[_Messages, MemoryObjectSendStream[SessionMessage]], None]:
    """Start a program that speaks the protocol, a line a message, and talk with it; its stderr is this process's.

    The SDK's own transport collects a line of any length. Raises OSError: the program cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(variables),
        limit=MAX_MESSAGE_BYTES,
        start_new_session=True,
    )
    to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks, from_server, to_server:
        tasks.start_soon(_read, process, to_client)
        tasks.start_soon(_write, process, from_client)
        try:
            yield from_server, to_server
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
            tasks.cancel_scope.cancel()


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Requests by another transport; reading more than MAX_MESSAGE_BYTES of an answer that is no stream fails."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send it. Raises httpx2.ReadError: the answer is compressed, so that its size is unknown."""
        # What is compressed may be any size once it is read.
        request.headers["Accept-Encoding"] = "identity"
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("the answer is compressed, which was not asked for")
        # The SDK bounds each event of a stream by itself.
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream)
        return response

    async def aclose(self) -> None:
        """Close the other one."""
        await self._inner.aclose()


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._inner:
            num_bytes += len(part)
            if num_bytes > MAX_MESSAGE_BYTES:
                raise httpx2.ReadError(f"an answer of more than {MAX_MESSAGE_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _read(
    process: asyncio.subprocess.Process, to_client: MemoryObjectSendStream[SessionMessage | Exception]
) -> None:
    """Pass on what the program says, until it ends or says too much at once; the session ends then."""
    assert process.stdout is not None
    async with to_client:
        with contextlib.suppress(anyio.BrokenResourceError, ValueError):
            while line := await process.stdout.readline():
                await to_client.send(_parsed(line))


async def _write(process: asyncio.subprocess.Process, from_client: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    async with from_client:
        # The reader notices the program's end.
        with contextlib.suppress(ConnectionError):
            async for each in from_client:
                line = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()


def _parsed(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let it end, or kill it, and in either case what it started."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
