"""A way to one service: what every client of it is made from."""

from __future__ import annotations

from typing import Self

import grpc

from penstock.network.rpc import open_channel
from penstock.security import NO_SECURITY, Security


class Connection:
    """A channel to a service, and the service's name in messages; an async context manager that closes the channel.

    Args:
        target: Its address, host:port, or those of several that stand in for each other, separated by commas; or a
            channel to it.
        security: Certificates and token, where `target` is an address.
        service: What it is called.
    """

    def __init__(
        self, target: str | grpc.aio.Channel, *, security: Security = NO_SECURITY, service: str = "broker"
    ) -> None:
        self.peer = f"{service} {target}" if isinstance(target, str) else service
        self.channel = open_channel(target, security) if isinstance(target, str) else target

    async def __aenter__(self) -> Self:
        """The connection itself."""
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Close the channel."""
        await self.close()

    async def close(self) -> None:
        """Close the channel; calls under way end."""
        await self.channel.close()
