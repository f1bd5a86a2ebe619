"""Tells a broker that a generator lives: one that is not heard counts as gone, and others take its sessions over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, broker_pb2_grpc

BEAT_EVERY_S = 1.0


@asynccontextmanager
async def heard(broker: Connection, *, run_id: str, generator_id: str) -> AsyncIterator[None]:
    """The broker hears a generator of that name, which asks for no lease, inside the block."""
    hello = broker_pb2.GeneratorHello(run_id=run_id, generator_id=generator_id, max_context_tokens=1 << 16)
    is_heard = asyncio.Event()

    async def requests() -> AsyncIterator[broker_pb2.StreamLeasesRequest]:
        yield broker_pb2.StreamLeasesRequest(hello=hello)
        while True:
            yield broker_pb2.StreamLeasesRequest(beat=broker_pb2.GeneratorBeat())
            await asyncio.sleep(BEAT_EVERY_S)

    async def listen() -> None:
        async for _response in broker_pb2_grpc.BrokerServiceStub(broker.channel).StreamLeases(requests()):
            is_heard.set()

    listening = asyncio.create_task(listen())
    try:
        hearing = asyncio.create_task(is_heard.wait())
        await asyncio.wait([listening, hearing], return_when=asyncio.FIRST_COMPLETED)
        hearing.cancel()
        if listening.done():
            await listening
            raise RuntimeError(f"the broker ended the stream of generator {generator_id}")
        yield
    finally:
        await end(listening)
