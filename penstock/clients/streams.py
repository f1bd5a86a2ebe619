"""Runs streaming calls for all clients: one call from first write to status, and successive calls with back-off.

Writes run in a separate task that never outlives the call: a request iterator passed to grpc would, and would consume
work meant for the next stream. The writer closes the iterator when it ends: one left to the garbage collector is closed
by the event loop in another task, at any moment, which reports an error if the connection broke during a write.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Self, TypeVar

import grpc

from penstock.channels import note_silence
from penstock.errors import (
    BadTokenError,
    InvalidFieldError,
    NotOfferedError,
    PenstockError,
    RunClosedError,
    ServiceUnavailableError,
)
from penstock.network.connection import Connection
from penstock.network.outage import Outage
from penstock.network.rpc import backoff_s, explained
from penstock.process.logger import get_logger
from penstock.process.tasks import Cancellation, end
from penstock.process.time_limits import TimeLimit

PERMANENT_ERRORS = (InvalidFieldError, BadTokenError, NotOfferedError)
"""Errors that end a client which outlives its run; after any other error a new stream may succeed."""

MOST_PATIENCE = 4
"""A client waits at most this many times its limit of silence for the first response of a stream."""

_log = get_logger()
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class Reconnecting:
    """Successive streams to a server, with back-off that is reset once a stream has worked.

    Args:
        peer: Names the server in messages.
        most_s: Longest delay between two streams.
    """

    def __init__(self, peer: str, *, most_s: float = 3.0) -> None:
        self.peer = peer
        self.outage = Outage(peer)
        """Whether the server is away; callers report failures to it."""
        self.is_up = False
        """Whether the stream has carried a response."""
        self.is_news = False
        """Whether the stream ended differently from the previous one."""
        self.num_connects = 0
        """Streams that have carried a response."""
        self._most_s = most_s
        self._patience = 1
        """How many times the limit of silence it waits for the first response of the next stream."""

    async def run(self, follow: Callable[[], Awaitable[None]], on_end: Callable[[PenstockError | None], None]) -> None:
        """Follow streams until cancelled.

        Args:
            follow: Makes one call by `listen` or `converse`.
            on_end: Called with a stream's error, None for OK; raises errors that a retry cannot fix.
        """
        delays, last = backoff_s(most_s=self._most_s), ""
        while True:
            error: PenstockError | None = None
            try:
                await follow()
            except PenstockError as caught:
                error = caught
            self.is_news, last = self.is_up or str(error) != last, str(error)
            on_end(error)
            if self.is_up:
                self.is_up, delays = False, backoff_s(most_s=self._most_s)
            await asyncio.sleep(next(delays))

    async def listen(
        self, call: Any, handle: Callable[[_Response], None], *, max_silence_s: float | None = None
    ) -> None:
        """Pass each response of a call to `handle`, which does not wait, until the server ends it with OK.

        Args:
            call: Its type takes no parameters at run time.
            handle: Takes one response.
            max_silence_s: The call is given up after this long without a response; see `_patience_s` for the first.

        Raises:
            PenstockError: The server's error; ServiceUnavailableError if it went silent.
        """
        cancellation = Cancellation()
        try:
            while (response := await self._read(call, max_silence_s)) is not grpc.aio.EOF:
                self.num_connects += not self.is_up
                self.is_up, self._patience = True, 1
                self.outage.answered()
                handle(response)
                # Possibly megabytes: not kept while the next one is awaited.
                del response
                # Who waits for it goes on before the next one is asked for.
                await asyncio.sleep(0)
        except grpc.aio.AioRpcError as error:
            cancellation.check()
            raise await explained(error, peer=self.peer) from error
        finally:
            call.cancel()

    async def _read(self, call: Any, max_silence_s: float | None) -> Any:
        try:
            return await read(call, peer=self.peer, max_silence_s=self._patience_s(max_silence_s))
        except ServiceUnavailableError:
            if not self.is_up:
                self._patience = min(2 * self._patience, MOST_PATIENCE)
            raise

    def _patience_s(self, max_silence_s: float | None) -> float | None:
        """How long to wait for the next response: for the first one longer, after streams that were given up without.

        New streams at a busy server wait in line. If all left it as soon as a thousand can, it would come to streams
        that were given up, and never to those that took their places.
        """
        if max_silence_s is None or self.is_up:
            return max_silence_s
        return max_silence_s * self._patience

    async def converse(
        self,
        call: Any,
        requests: AsyncGenerator[_Request, None],
        handle: Callable[[_Response], None],
        *,
        max_silence_s: float,
    ) -> None:
        """`listen`, and write `requests` meanwhile.

        Args:
            call: A stream-stream call to which nothing was written yet.
            requests: The requests to write, in order; waits while there is none. Closed when this returns.
            handle: Takes one response.
            max_silence_s: The call is given up after this long without a response.
        """
        writer = asyncio.create_task(_write_all(call, requests))
        try:
            await self.listen(call, handle, max_silence_s=max_silence_s)
        except asyncio.CancelledError:
            # The writer cancels the call when the request iterator fails: that error is the one to report.
            if writer.done() and not writer.cancelled():
                writer.result()
            raise
        finally:
            await end(writer)


class BackgroundStream(ABC):
    """Base of clients that follow a run in the background, while they are entered as a context manager.

    It fails for good when the run is closed, or with an error that a retry cannot fix.
    """

    def __init__(self, broker: Connection, *, run_id: str) -> None:
        self._run_id, self._peer = run_id, broker.peer
        self._stream = Reconnecting(broker.peer)
        self._failure: PenstockError | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start following."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """End the stream."""
        if self._task is not None:
            await end(self._task)

    @abstractmethod
    async def _follow(self) -> None:
        """Follow one stream to its end. Raises PenstockError."""

    def _note_lost(self, error: PenstockError) -> None:
        """A stream was lost and will be reopened."""
        self._stream.outage.failed(error)

    def _fail(self, error: PenstockError) -> None:
        """There will be no more streams."""
        self._failure = error

    async def _run(self) -> None:
        try:
            await self._stream.run(self._follow, self._on_end)
        except PenstockError as error:
            self._fail(error)

    def _on_end(self, error: PenstockError | None) -> None:
        if error is None:
            raise RunClosedError(f"{self._peer}: run {self._run_id!r} was closed", run_id=self._run_id)
        if not error.is_retryable:
            raise error
        self._note_lost(error)


async def read(call: Any, *, peer: str, max_silence_s: float | None) -> Any:
    """The next response, grpc.aio.EOF after the last; ServiceUnavailableError after `max_silence_s` without one."""
    try:
        with TimeLimit(max_silence_s):
            return await call.read()
    except TimeoutError:
        note_silence(call)
        raise ServiceUnavailableError(f"{peer}: silent for {max_silence_s:.0f} s") from None


async def _write_all(call: Any, requests: AsyncGenerator[Any, None]) -> None:
    try:
        async with aclosing(requests):
            async for request in requests:
                await call.write(request)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        # The call ended during a write; its reader gets the status.
        _log.debug("stream ended while writing", error=type(error).__name__)
    except BaseException:
        call.cancel()
        raise
