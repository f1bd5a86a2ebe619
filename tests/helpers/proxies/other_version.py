"""A way to a server on which messages are those of another version of Penstock, in both directions.

`earlier`: without the calls and fields that the contract had not on 24 November 2026 (`earlier_wire.json`), so that
client and server each talk with one of that day. `later`: with a field in every message that nobody knows yet.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from penstock.network.rpc import open_channel

Change = Callable[[Message], int]
"""Changes a message, and counts the changes."""
_EARLIER = Path(__file__).with_name("earlier_wire.json")
_PACKAGE = "penstock.v1."
# Number 2000, bytes.
_UNKNOWN = b"\x82\x7d\x05later"


def later(message: Message) -> int:
    """Add a field of a later version to it, and to each message in it."""
    num_changes = sum(map(later, _messages(message)))
    message.MergeFromString(_UNKNOWN)
    return num_changes + 1


def earlier(message: Message) -> int:
    """Remove what the earlier version did not have from it, and from each message in it."""
    known = _fields().get(message.DESCRIPTOR.full_name.removeprefix(_PACKAGE))
    new = [field for field, _ in message.ListFields() if known is not None and field.number not in known]
    for field in new:
        message.ClearField(field.name)
    return len(new) + sum(map(earlier, _messages(message)))


def _messages(message: Message) -> list[Message]:
    found: list[Message] = []
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        if field.message_type.GetOptions().map_entry:
            values = value.values() if field.message_type.fields_by_name["value"].message_type else ()
            found += values
        else:
            found += value if field.is_repeated else [value]
    return found


@cache
def _document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_EARLIER.read_text())
    return found


@cache
def _fields() -> dict[str, frozenset[int]]:
    return {name: frozenset(_numbers(text)) for name, text in _document()["fields"].items()}


def _numbers(text: str) -> list[int]:
    ends = [list(map(int, part.split("-"))) for part in text.split(",") if part]
    return [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)]


class OtherVersion(grpc.GenericRpcHandler):
    """The calls of one proxy."""

    def __init__(self, channel: grpc.aio.Channel, change: Change) -> None:
        self._channel, self._change = channel, change
        self.num_changes = 0
        """In all messages so far."""
        self.address = ""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        name = details.method.removeprefix(f"/{_PACKAGE}").replace("/", ".")
        if self._change is earlier and name not in _document()["methods"]:
            return None
        service, _, method = name.partition(".")
        described = descriptor_pool.Default().FindServiceByName(f"{_PACKAGE}{service}").methods_by_name[method]
        requests, responses = self._changed(described.input_type), self._changed(described.output_type)

        async def forward(given: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async def sent() -> AsyncIterator[bytes]:
                async for each in given:
                    yield requests(each)

            # On the wire a call of one message is a stream of one.
            call = self._channel.stream_stream(details.method)(sent(), timeout=context.time_remaining())
            try:
                async for each in call:
                    yield responses(each)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)

    def _changed(self, kind: Any) -> Callable[[bytes], bytes]:
        made = message_factory.GetMessageClass(kind)

        def changed(content: bytes) -> bytes:
            message = made.FromString(content)
            self.num_changes += self._change(message)
            return message.SerializeToString()

        return changed


@asynccontextmanager
async def through_another_version(target: str, change: Change) -> AsyncIterator[OtherVersion]:
    """A proxy to `target`, on which every message is changed."""
    async with open_channel(target) as channel:
        server, found = grpc.aio.server(), OtherVersion(channel, change)
        server.add_generic_rpc_handlers((found,))
        found.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield found
        finally:
            await server.stop(grace=0)
