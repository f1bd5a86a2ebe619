"""Reads a bidirectional stream: handles requests while the other half sends.

An error in a request surfaces in the sending half at its next `check`, so that it becomes the stream's status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar

from penstock.errors import DeadlineError, InvalidFieldError

HELLO_TIMEOUT_S = 10.0

_Request = TypeVar("_Request")


async def first_request(requests: AsyncIterator[_Request]) -> _Request:
    """The first request of a stream. Raises InvalidFieldError if there is none, DeadlineError if it is late."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(requests)
    except StopAsyncIteration as error:
        raise InvalidFieldError("hello: the stream ended before its first message", field="hello") from error
    except TimeoutError as error:
        raise DeadlineError(f"hello: no first message in {HELLO_TIMEOUT_S} s") from error


async def wait_for_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until `event` is set, then clear it; returns whether it was set in time."""
    if event.is_set():
        event.clear()
        return True
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


class Intake(Generic[_Request]):
    """An async context that reads `requests` in the background and hands each to `handle`, one after the other.

    `wake` is set after each request, at the end and on an error.
    """

    def __init__(
        self,
        requests: AsyncIterator[_Request],
        handle: Callable[[_Request], Awaitable[None]],
        wake: asyncio.Event,
    ) -> None:
        self._requests, self._handle, self._wake = requests, handle, wake
        self._task: asyncio.Task[None] | None = None
        self._has_begun = False
        self.patience_s = HELLO_TIMEOUT_S
        """How long `check_begun` waits for the first request."""
        self._begin_before_s = asyncio.get_running_loop().time() + HELLO_TIMEOUT_S

    @property
    def is_ended(self) -> bool:
        """Whether the client has stopped sending."""
        return self._task is not None and self._task.done()

    def check(self) -> None:
        """Re-raise the error of handling a request, if any."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    def check_begun(self) -> None:
        """Raise DeadlineError if no request came for HELLO_TIMEOUT_S; for streams without a hello."""
        if not self._has_begun and asyncio.get_running_loop().time() >= self._begin_before_s:
            raise DeadlineError(f"hello: no first message in {HELLO_TIMEOUT_S} s")

    async def __aenter__(self) -> Intake[_Request]:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                # Retrieved, so that an error that is no longer checked is not reported as lost.
                self._task.exception()

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                self._has_begun = True
                await self._handle(request)
                self._wake.set()
        finally:
            self._wake.set()
