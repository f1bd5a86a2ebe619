"""One bidirectional call from its first write to its status: the part that every streaming client has in common.

Writes run in a task of their own that never outlives the call: a request iterator handed to grpc would, and would take
work meant for the next stream. The writer closes the iterator when it ends: one that is left to the garbage collector
is closed by the event loop in a task of its own, at any moment, which complains where a link broke during a write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import structlog

from penstock.errors import ServiceUnavailableError
from penstock.rpc import explained

_log = structlog.get_logger()
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


async def converse(
    call: Any,
    requests: AsyncGenerator[_Request, None],
    handle: Callable[[_Response], None],
    *,
    peer: str,
    max_silence_s: float,
) -> None:
    """Write `requests` and hand each response to `handle` until the server ends the call with OK.

    Args:
        call: A stream-stream call that nothing was written to yet (its type takes no parameters at run time).
        requests: What to write, in order; waits where there is nothing to say. Closed when this returns.
        handle: Takes one response, without waiting.
        peer: Names the server in messages.
        max_silence_s: The call is given up when no response came for so long.

    Raises:
        PenstockError: What the server ended the call with; ServiceUnavailableError when it went silent.
    """
    writer = asyncio.create_task(_write_all(call, requests))
    try:
        while True:
            response = await _read(call, peer, max_silence_s)
            if response is grpc.aio.EOF:
                return
            handle(response)
    except grpc.aio.AioRpcError as error:
        raise await explained(error, peer=peer) from error
    except asyncio.CancelledError:
        # The writer cancels the call when the request iterator fails: that error is the one to report.
        if writer.done() and not writer.cancelled():
            writer.result()
        raise
    finally:
        writer.cancel()
        call.cancel()
        await asyncio.gather(writer, return_exceptions=True)


async def _read(call: Any, peer: str, max_silence_s: float) -> Any:
    try:
        async with asyncio.timeout(max_silence_s):
            return await call.read()
    except TimeoutError:
        raise ServiceUnavailableError(f"{peer}: silent for {max_silence_s:.0f} s") from None


async def _write_all(call: Any, requests: AsyncGenerator[Any, None]) -> None:
    try:
        async with aclosing(requests):
            async for request in requests:
                await call.write(request)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        # The call ended while something was being written; whoever reads it gets its status.
        _log.debug("stream ended while writing", error=type(error).__name__)
    except BaseException:
        call.cancel()
        raise
