"""Keeps the connection to the broker that owns a run's core, where the own broker names one and it can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from penstock.network.connection import Connection
from penstock.process.logger import get_logger
from penstock.process.tasks import end
from penstock.security import NO_SECURITY, Security
from penstock.targets import checked_address
from penstock.v1 import broker_pb2

CONNECT_TIMEOUT_S = 5.0
STAY_S = 30.0
"""How long the own broker is kept once the owner could not be reached, or was lost, unless another one is named."""

_log = get_logger()


class CoreConnection:
    """The connection for one stream.

    Args:
        own: To the own broker, or to several of which one answers.
        security: Certificates and token for the owner.
        on_ready: Called when the owner is connected: the stream should be opened again.
    """

    def __init__(self, own: Connection, *, security: Security = NO_SECURITY, on_ready: Callable[[], None]) -> None:
        self._own, self._security, self._on_ready = own, security, on_ready
        self._owner: Connection | None = None
        self._address = ""
        """Of the owner, as it was said last."""
        self._epoch = 0
        self._connecting: asyncio.Task[None] | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """Over which the next stream is opened."""
        return self._own.channel if self._owner is None else self._owner.channel

    @property
    def is_away(self) -> bool:
        """Whether that is the owner's."""
        return self._owner is not None

    def follow(self, said: broker_pb2.CoreOwner) -> None:
        """Connect to the broker that is said to be the owner, in the background, and again and again if that fails."""
        if said.epoch < self._epoch:
            _log.info("owner of the run refused: an older one than is known", epoch=said.epoch, known=self._epoch)
            return
        try:
            self._address, self._epoch = checked_address(said.address), said.epoch
        except ValueError as error:
            _log.warning("owner of the run refused: its address is malformed", error=str(error))
            return
        self._connect_after(0.0)

    async def lost(self) -> None:
        """The stream over the owner's connection failed: the own broker is taken again, for a while."""
        owner, self._owner = self._owner, None
        if owner is not None:
            self._connect_after(STAY_S)
            await owner.close()

    async def close(self) -> None:
        """Close what was opened here."""
        if self._owner is not None:
            await self._owner.close()
        if self._connecting is not None:
            await end(self._connecting)

    def _connect_after(self, delay_s: float) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        self._connecting = asyncio.create_task(self._connect(self._address, delay_s))

    async def _connect(self, address: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while (connection := await _connected(address, self._security)) is None:
            _log.info("owner of the run not reached: the own broker is kept", address=address)
            await asyncio.sleep(STAY_S)
        before, self._owner = self._owner, connection
        self._on_ready()
        if before is not None:
            await before.close()


async def _connected(address: str, security: Security) -> Connection | None:
    """A connection to a broker; None if it cannot be reached."""
    connection = Connection(address, security=security)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await connection.channel.channel_ready()
    except BaseException as error:
        await connection.close()
        if not isinstance(error, TimeoutError):
            raise
        return None
    return connection
