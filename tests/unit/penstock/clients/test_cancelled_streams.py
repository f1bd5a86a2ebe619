"""A stream that is lost while its client is cancelled: the client ends, as gRPC's own error hides the cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from penstock.clients.streams import Reconnecting
from penstock.errors import ServiceUnavailableError
from penstock.network.rpc import call_with_retry

LOST = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")


class LostWhenCancelled:
    """A call whose cancellation comes to nothing, as it fails at that moment."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def read(self) -> Any:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise LOST from None

    def cancel(self) -> None:
        pass


async def ends_cancelled(task: asyncio.Task[Any], call: LostWhenCancelled) -> None:
    await call.begun.wait()
    task.cancel()
    # Not `asyncio.timeout`: it would cancel once more, which may come to nothing, too.
    await asyncio.wait([task], timeout=20)
    assert task.cancelled()


async def test_a_stream_is_not_opened_again() -> None:
    call, stream, ends = LostWhenCancelled(), Reconnecting("broker"), []
    following = stream.run(lambda: stream.listen(call, lambda _response: None), ends.append)
    await ends_cancelled(asyncio.create_task(following), call)
    assert ends == []


async def test_a_call_is_not_repeated() -> None:
    call = LostWhenCancelled()

    async def method(_request: Any, *, timeout: float) -> Any:
        return await call.read()

    calling = call_with_retry(method, None, peer="broker", give_up_after_s=None)
    await ends_cancelled(asyncio.create_task(calling), call)


async def test_what_a_cancelled_task_does_at_its_end_fails_by_its_own_error() -> None:
    seen: list[str] = []

    async def method(_request: Any, *, timeout: float) -> Any:
        raise LOST

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await call_with_retry(method, None, peer="broker", give_up_after_s=0.0)
            except ServiceUnavailableError as error:
                seen.append(str(error))

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(seen) == 1
