"""Small rules for tasks: the first of several, work that must not be cut short, loops that live as long as work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def uninterrupted(work: Awaitable[_Result]) -> _Result:
    """The result of `work`, which runs to its end even when the caller is cancelled; the caller then ends after it.

    Raises:
        asyncio.CancelledError: The caller was cancelled and `work` ended well.
        Exception: What `work` raised, cancelled or not.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        # An error of the work matters more than the cancellation: raise it if there is one.
        task.result()
        raise


class Cancellation:
    """Whether the present task was cancelled since this was made.

    A call of gRPC that fails while its caller is cancelled raises its own error, and the cancellation is lost: a
    caller that retries must check here first.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_before = task, task.cancelling()

    def check(self) -> None:
        """Raises asyncio.CancelledError if so."""
        if self._task.cancelling() > self._num_before:
            raise asyncio.CancelledError


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def race(*works: Awaitable[_Result]) -> _Result:
    """What the first of several works to end returned or raised; of two that end at once, the first one named.

    The others are cancelled and have ended on return. Pass a task that is to go on as `asyncio.shield(task)`.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        await end(*tasks)


async def run_beside(
    work: Coroutine[Any, Any, _Result], loops: Sequence[Callable[[], Coroutine[Any, Any, None]]]
) -> _Result:
    """The result of `work`, with `loops` running beside it; they are cancelled when it ends.

    Raises:
        Exception: What `work` raised, or what a loop raised first; `work` is then cancelled.
    """
    main = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(loop()) for loop in loops]
    try:
        await until_first_failure(main, others)
        return main.result()
    finally:
        await end(main, *others)


async def set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Whether `event` is set, after waiting for it for at most `timeout_s` seconds; None waits indefinitely."""
    if event.is_set():
        return True
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    return False


async def until_first_failure(main: asyncio.Future[Any], others: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until `main` ends, however it does; raises what one of `others` raised before."""
    pending = {main, *others}
    while not main.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {main}:
            task.result()


async def unless_set(work: Coroutine[Any, Any, _Result], stop: asyncio.Event) -> _Result | None:
    """The result of `work`, or None when `stop` was set first; `work` is then cancelled and has ended.

    Raises:
        Exception: What `work` raised, also on its way out.
    """
    main = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({main, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            return main.result()
        main.cancel()
        await asyncio.wait([main])
        return None if main.cancelled() else main.result()
    finally:
        await end(main, stopped)
