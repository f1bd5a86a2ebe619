"""Puts interceptors around the handlers of gRPC methods: they see each call, and each request of a stream."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

from penstock.process.tasks import uninterrupted

Context = grpc.aio.ServicerContext[Any, Any]
Around = Callable[[Any, Context], AbstractAsyncContextManager[Any]]
"""Takes a call's request, or its stream of them, and yields what the handler gets; the handler runs inside."""


def behaviour_of(handler: Any) -> Any:
    """The function that serves a handler's calls."""
    return getattr(handler, _kind(handler))


def wrapped(
    handler: Any,
    around: Around,
    *,
    request_deserializer: Callable[[bytes], Any] | None,
    response_serializer: Callable[[Any], bytes] | None,
) -> Any:
    """A handler whose calls are served inside `around`.

    A generator of responses is closed when its call ends, however that happens: gRPC itself leaves one whose client is
    gone to the garbage collector, which closes it and those inside it at once, each in a task of its own.
    """
    behaviour = behaviour_of(handler)

    async def unary(request: Any, context: Context) -> Any:
        async with around(request, context) as taken:
            return await behaviour(taken, context)

    async def stream(request: Any, context: Context) -> None:
        async with around(request, context) as taken:
            served = behaviour(taken, context)
            if inspect.isawaitable(served):
                # Wrapped already: it sends its responses itself.
                await served
                return
            try:
                async for response in served:
                    await context.write(response)
            finally:
                # gRPC cancels a call whose client is gone, also after a response that could not be sent.
                await uninterrupted(served.aclose())

    return getattr(grpc, f"{_kind(handler)}_rpc_method_handler")(
        stream if handler.response_streaming else unary,
        request_deserializer=request_deserializer,
        response_serializer=response_serializer,
    )


def checked(request: Any, check: Callable[[Any], None]) -> Any:
    """The request once `check` has not raised; of a stream, each as it is read."""
    if hasattr(request, "__aiter__"):
        return _CheckedRequests(request, check)
    check(request)
    return request


class _CheckedRequests:
    def __init__(self, requests: AsyncIterator[Any], check: Callable[[Any], None]) -> None:
        # As gRPC made it: an iterator taken from it here would outlive a servicer that never reads.
        self._requests, self._check = requests, check

    def __aiter__(self) -> _CheckedRequests:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        self._check(request)
        return request


def _kind(handler: Any) -> str:
    streaming = (handler.request_streaming, handler.response_streaming)
    return "_".join("stream" if streams else "unary" for streams in streaming)
