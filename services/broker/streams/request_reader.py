"""Reads a bidirectional stream: handles requests while the other half sends.

An error in a request surfaces in the sending half at its next `check`, so that it becomes the stream's status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from penstock.errors import DeadlineError, InvalidFieldError
from penstock.process.tasks import end
from penstock.process.time_limits import Wake

HELLO_TIMEOUT_S = 10.0
CHECK_EVERY_S = 5.0

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


async def first_request(requests: AsyncIterator[_Request]) -> _Request:
    """The first request of a stream. Raises InvalidFieldError if there is none, DeadlineError if it is late."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(requests)
    except StopAsyncIteration as error:
        raise InvalidFieldError("hello: the stream ended before its first message", field="hello") from error
    except TimeoutError as error:
        raise DeadlineError(f"hello: no first message in {HELLO_TIMEOUT_S} s") from error


async def wait_for_event(event: Wake, timeout_s: float) -> bool:
    """Wait until `event` is set, then clear it; returns whether it was set in time."""
    return await event.take_within(timeout_s)


async def signs_during(
    work: Coroutine[Any, Any, None], sign: _Answer, *, every_s: float
) -> AsyncGenerator[_Answer, None]:
    """A sign of life now and then until `work` is done, whose error is raised; none if that is quick."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=every_s)
            if not task.done():
                yield sign
        task.result()
    finally:
        await end(task)


class Intake(Generic[_Request]):
    """An async context that reads `requests` in the background and hands each to `handle`, one after the other.

    `wake` is set after each request, at the end and on an error.
    """

    def __init__(
        self,
        requests: AsyncIterator[_Request],
        handle: Callable[[_Request], Awaitable[None]],
        wake: Wake,
    ) -> None:
        self._requests, self._handle, self._wake = requests, handle, wake
        self.has_begun = False
        """Whether a request came."""
        self._task = asyncio.create_task(self._read())

    @property
    def is_ended(self) -> bool:
        """Whether the client has stopped sending."""
        return self._task.done()

    def check(self) -> None:
        """Re-raise the error of handling a request, if any."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def __aenter__(self) -> Intake[_Request]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # Also retrieves an error that is no longer checked, so that it is not reported as lost.
        await end(self._task)

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                self.has_begun = True
                await self._handle(request)
                self._wake.set()
        finally:
            self._wake.set()


async def answered(
    requests: AsyncIterator[_Request],
    handle: Callable[[_Request], Awaitable[None]],
    answers: asyncio.Queue[_Answer],
    wake: Wake,
    check: Callable[[], bool],
) -> AsyncGenerator[_Answer, None]:
    """The answers of a stream without a hello, which `handle` puts into `answers`.

    Once `answers` is full, the client's requests are not read either. The stream ends when the client has stopped
    sending, or `check` returns True: it is called at least every CHECK_EVERY_S, and may raise to end the stream too.

    Raises:
        DeadlineError: No request came for HELLO_TIMEOUT_S.
    """
    loop = asyncio.get_running_loop()
    begin_before_s = loop.time() + HELLO_TIMEOUT_S
    async with Intake(requests, handle, wake) as intake:
        while True:
            is_ended = intake.is_ended
            while not answers.empty():
                yield answers.get_nowait()
            if is_ended:
                break
            if not intake.has_begun and loop.time() >= begin_before_s:
                raise DeadlineError(f"hello: no first message in {HELLO_TIMEOUT_S} s")
            if check():
                return
            await wait_for_event(wake, min(CHECK_EVERY_S, HELLO_TIMEOUT_S))
        intake.check()
