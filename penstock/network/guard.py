"""Guards a servicer: rejects requests that do not parse, and turns errors into a status.

Promise: no matter what a client sends or a servicer raises, the call ends with a documented code and a reason.

A servicer may answer with bytes in place of a message: one that it has serialized itself, to save copies. A method
marked with `takes_bytes` gets its requests as they came, and has to raise InvalidFieldError if one does not parse.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from penstock.errors import InternalError, InvalidFieldError, NotOfferedError, PenstockError, to_status
from penstock.process.logger import get_logger
from penstock.security.handlers import Context, behaviour_of, checked, wrapped

_log = get_logger()
_Method = TypeVar("_Method", bound=Callable[..., Any])
_UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNIMPLEMENTED.value[0])
"""What `code()` gives, by grpc's types and by its code."""


_TAKES_BYTES = "takes_bytes"


def takes_bytes(method: _Method) -> _Method:
    """Mark a servicer's method whose requests are not to be deserialized for it."""
    setattr(method, _TAKES_BYTES, True)
    return method


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns a raised PenstockError into its status; any other exception is logged and answered with INTERNAL."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        is_read_there = getattr(behaviour_of(handler), _TAKES_BYTES, False)
        return wrapped(
            handler,
            partial(_guarded, method),
            request_deserializer=_careful(None if is_read_there else handler.request_deserializer),
            response_serializer=_sparing(handler.response_serializer),
        )


@asynccontextmanager
async def _guarded(method: str, request: Any, context: Context) -> AsyncIterator[Any]:
    try:
        yield checked(request, _refuse_undecodable)
    except (grpc.aio.BaseError, asyncio.CancelledError):
        # The call has ended: aborted, or its client is gone.
        raise
    except Exception as error:
        await _abort(error, context, method)


async def _abort(error: Exception, context: Context, method: str) -> None:
    # A generated base class sets the code before it raises: its servicer leaves the method out. Without, it is a bug.
    if isinstance(error, NotImplementedError) and context.code() in _UNIMPLEMENTED:
        error = NotOfferedError(f"{method} is not offered by this server")
    if not isinstance(error, PenstockError):
        _log.error("call failed", method=method, exc_info=error)
        error = InternalError(f"{method} failed: {type(error).__name__}; see this server's log")
    await context.abort_with_status(rpc_status.to_status(to_status(error)))


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """A request that does not parse as the method's message."""

    error: InvalidFieldError


def _careful(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """A deserializer that never raises: gRPC would answer with UNKNOWN and a stack trace in the log."""

    def deserialized(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError as error:
            text = f"request: {len(data)} bytes that are no message of this method: {error}"
            return _Undecodable(InvalidFieldError(text, field="request"))

    return deserialized


def _sparing(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """A serializer that leaves alone what is serialized."""

    def serialized(message: Any) -> bytes:
        return message if serialize is None or isinstance(message, bytes) else serialize(message)

    return serialized


def _refuse_undecodable(request: Any) -> None:
    if isinstance(request, _Undecodable):
        raise request.error
