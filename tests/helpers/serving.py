"""A real gRPC server on a free loopback port, for the length of one `async with`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from penstock.network.rpc import Server, Service, open_channel
from penstock.security import NO_SECURITY, Security

_READY_S = 20.0


@asynccontextmanager
async def serving(*services: Service, security: Security = NO_SECURITY) -> AsyncIterator[tuple[Server, str]]:
    """The running server and its address."""
    server = Server(listen="127.0.0.1:0", services=services, security=security)
    port = await server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_s=0.2)


@asynccontextmanager
async def channel_to(*services: Service, security: Security = NO_SECURITY) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a running server of these services."""
    async with serving(*services, security=security) as (_, target), open_channel(target, security) as channel:
        # On a busy machine a first attempt to connect may run out of time, and a call without retries with it.
        await asyncio.wait_for(channel.channel_ready(), _READY_S)
        yield channel
