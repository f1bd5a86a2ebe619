"""Streams whose client is gone: their generators are closed with the call, not by the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from penstock.network.rpc import service_of
from penstock.v1 import broker_pb2, broker_pb2_grpc
from tests.helpers.serving import channel_to
from tests.helpers.waiting import until

MIB = 1024 * 1024


@contextmanager
def noting_abandoned() -> Iterator[list[str]]:
    """The names of generators, begun inside, that the garbage collector had to close."""
    names, before = list[str](), sys.get_asyncgen_hooks()

    def note(generator: Any) -> None:
        names.append(generator.__qualname__)
        assert before.finalizer is not None
        before.finalizer(generator)

    sys.set_asyncgen_hooks(finalizer=note)
    try:
        yield names
    finally:
        gc.collect()
        sys.set_asyncgen_hooks(*before)


class Endless(broker_pb2_grpc.BrokerServiceServicer):
    """Sends more than a connection takes, from a generator inside another one."""

    def __init__(self) -> None:
        self.num_sent, self.is_closed = 0, False

    async def ExportTrajectories(
        self, request: broker_pb2.ExportTrajectoriesRequest, context: Any
    ) -> AsyncIterator[broker_pb2.ExportTrajectoriesResponse]:
        async with aclosing(self._responses()) as responses:
            async for response in responses:
                yield response

    async def _responses(self) -> AsyncGenerator[broker_pb2.ExportTrajectoriesResponse, None]:
        response = broker_pb2.ExportTrajectoriesResponse()
        response.piece.data = bytes(MIB)
        try:
            while True:
                self.num_sent += 1
                yield response
        finally:
            # As most do: a cancellation would cut this short.
            await asyncio.sleep(0.01)
            self.is_closed = True


async def test_a_stream_whose_client_leaves_is_closed_with_its_call() -> None:
    servicer = Endless()
    with noting_abandoned() as abandoned:
        async with channel_to(service_of(servicer)) as channel:
            call = broker_pb2_grpc.BrokerServiceStub(channel).ExportTrajectories(broker_pb2.ExportTrajectoriesRequest())
            await call.read()
            # Nothing more is read, until the server waits for room.
            num_sent = 0
            while num_sent != (num_sent := servicer.num_sent):  # noqa: ASYNC110 -- that nothing happens is no event
                await asyncio.sleep(0.1)
            call.cancel()
            await until(lambda: servicer.is_closed)
            del call
    assert not [name for name in abandoned if "Endless" in name or "wrapped" in name]
