"""Requests that no honest client sends: made from the descriptors of the protos by a seeded generator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from penstock.errors import ERROR_DOMAIN

CALL_TIMEOUT_S = 10.0
FIRST_RESPONSE_S = 0.3
"""A stream that has said nothing after this long has taken the request, and waits."""
BROKEN_WRITE = "Internal error from Core"
"""What gRPC's client says, instead of the server's status, where that status came while a request was written."""
MAX_BROKEN_WRITES = 50
MAX_DEPTH = 4
_BITS = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
}
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "\0", "a" * 129, "../..", "..", "{run}", "\u202e\u4e2d", "x" * 70_000)
STATED_CODES = frozenset(
    getattr(grpc.StatusCode, name)
    for name in (
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ALREADY_EXISTS",
        "UNIMPLEMENTED",
        "DEADLINE_EXCEEDED",
        "DATA_LOSS",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
    )
)
"""What a server may answer to nonsense. Not UNKNOWN, INTERNAL or UNAVAILABLE: those are faults of the server."""


class Fuzzer:
    """Random messages; `names` are words that exist at the server, so that some requests get past the first check."""

    def __init__(self, seed: int, names: Sequence[str]) -> None:
        self._numbers = random.Random(seed)
        self._texts = (*_TEXTS, *names, *names, *names)

    def message(self, method: MethodDescriptor, depth: int = MAX_DEPTH) -> Message:
        """A request of a method, with any values of the right types."""
        return self._fill(GetMessageClass(method.input_type)(), depth)

    def _fill(self, message: Message, depth: int) -> Message:
        for field in message.DESCRIPTOR.fields:
            if self._numbers.random() < 0.3:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                self._fill_list(getattr(message, field.name), field, depth)
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                if depth:
                    getattr(message, field.name).SetInParent()
                    self._fill(getattr(message, field.name), depth - 1)
            else:
                setattr(message, field.name, self._value(field))
        return message

    def _fill_list(self, items: Any, field: FieldDescriptor, depth: int) -> None:
        for _ in range(self._numbers.choice([0, 1, 1, 2, 5])):
            if field.type != FieldDescriptor.TYPE_MESSAGE:
                items.append(self._value(field))
            elif depth:
                self._fill(items.add(), depth - 1)

    def _value(self, field: FieldDescriptor) -> Any:
        numbers = self._numbers
        if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            return numbers.choice(_FLOATS[:4] if field.type == FieldDescriptor.TYPE_FLOAT else _FLOATS)
        if field.type == FieldDescriptor.TYPE_STRING:
            return numbers.choice(self._texts)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return numbers.randbytes(numbers.choice([0, 1, 3, 4, 8, 12, 400]))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return numbers.random() < 0.5
        if field.type == FieldDescriptor.TYPE_ENUM:
            return numbers.choice([0, 1, 2, 3, 99])
        least, most = _BITS[field.type]
        return numbers.choice([0, 1, 1, 2, 3, least, most, numbers.randint(least, most)])

    def damaged(self, data: bytes) -> bytes:
        """A serialized message with some bytes changed, cut off or put in."""
        numbers, found = self._numbers, bytearray(data)
        for _ in range(numbers.randint(1, 4)):
            place = numbers.randrange(len(found) + 1)
            kind = numbers.randrange(3)
            if kind == 0:
                found[place:place] = numbers.randbytes(numbers.randint(1, 6))
            elif kind == 1:
                del found[place:]
            elif place < len(found):
                found[place] = numbers.randrange(256)
        return bytes(found)

    def garbage(self) -> bytes:
        """Bytes that were never a message."""
        return self._numbers.randbytes(self._numbers.choice([1, 7, 100, 3000]))

    def requests(self, method: MethodDescriptor, valid: Sequence[Message]) -> Iterator[bytes]:
        """One of each kind: any values, a valid request that was damaged, garbage."""
        yield self.message(method).SerializeToString()
        for message in valid:
            yield self.damaged(message.SerializeToString())
        yield self.garbage()


def methods(*services: ServiceDescriptor) -> list[MethodDescriptor]:
    """Every method of the services."""
    return [method for service in services for method in service.methods]


async def answer(
    channel: grpc.aio.Channel, method: MethodDescriptor, *requests: bytes, patience_s: float = FIRST_RESPONSE_S
) -> grpc.StatusCode:
    """The status that raw requests end with; a stream that would go on is left after its first response, or patience.

    Raises AssertionError where the status is not one that a server may answer to nonsense, or says no reason.
    """
    for _ in range(MAX_BROKEN_WRITES):
        try:
            await _ask(channel, method, requests, patience_s)
        except grpc.aio.AioRpcError as error:
            if error.details() == BROKEN_WRITE and method.client_streaming:
                continue
            check_stated(method, error)
            return error.code()
        return grpc.StatusCode.OK
    raise AssertionError(f"{method.name}: {MAX_BROKEN_WRITES} streams ended while they were written to")


async def _ask(
    channel: grpc.aio.Channel, method: MethodDescriptor, requests: Sequence[bytes], patience_s: float
) -> None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.client_streaming:
        kind = channel.stream_stream if method.server_streaming else channel.stream_unary
        call = kind(path)(_stream(requests), timeout=CALL_TIMEOUT_S)
    else:
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = kind(path)(requests[0], timeout=CALL_TIMEOUT_S)
    if method.server_streaming:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await call.read()
        call.cancel()
    else:
        await call


async def _stream(requests: Sequence[bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


def check_stated(method: MethodDescriptor, error: grpc.aio.AioRpcError) -> None:
    """Raises AssertionError unless the error has a stated code, a reason, and words."""
    where = f"{method.name}: {error.code().name}: {error.details()}"
    assert error.code() in STATED_CODES, where
    assert error.details(), where
    assert "Traceback" not in error.details(), where
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    assert status is not None, where
    assert any(detail.Unpack(info) and info.domain == ERROR_DOMAIN and info.reason for detail in status.details), where
