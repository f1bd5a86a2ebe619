"""A stream follows the run's owner where that can be reached, and what is said of it is checked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.clients.sharding import core_connection
from penstock.clients.sharding.core_connection import CoreConnection
from penstock.network.connection import Connection
from penstock.v1 import broker_pb2
from tests.helpers.brokers.scripted_shards import shard_brokers
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow


@asynccontextmanager
async def core_connection_of(own: str, ready: list[bool]) -> AsyncIterator[CoreConnection]:
    async with Connection(own) as connection:
        core = CoreConnection(connection, on_ready=lambda: ready.append(True))
        try:
            yield core
        finally:
            await core.close()


async def test_it_goes_to_the_owner_and_back_when_that_is_lost_and_there_again() -> None:
    ready: list[bool] = []
    async with shard_brokers(2) as (_, [own, owner]), core_connection_of(own.address, ready) as core:
        assert not core.is_away
        core.follow(broker_pb2.CoreOwner(address=owner.address, epoch=2))
        await until(lambda: core.is_away)
        await core.lost()
        assert not core.is_away
        core.follow(broker_pb2.CoreOwner(address=owner.address, epoch=3))
        await until(lambda: core.is_away)
        assert len(ready) == 2


async def test_one_that_cannot_be_reached_is_tried_again_while_the_own_broker_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_connection, "CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(core_connection, "STAY_S", 0.01)
    ready: list[bool] = []
    async with shard_brokers(2) as (_, [own, owner]), core_connection_of(own.address, ready) as core:
        assert owner.server is not None
        await owner.server.stop(grace_s=0)
        core.follow(broker_pb2.CoreOwner(address=owner.address, epoch=1))
        attempts = core._connecting
        core.follow(broker_pb2.CoreOwner(address=own.address, epoch=2))
        await until(lambda: core.is_away)
        assert attempts is not None
        assert attempts.cancelled()
        assert ready == [True]


@pytest.mark.parametrize(
    "said",
    [
        broker_pb2.CoreOwner(address="127.0.0.1:1", epoch=4),
        broker_pb2.CoreOwner(address="nowhere", epoch=6),
        broker_pb2.CoreOwner(address="http://127.0.0.1:1", epoch=6),
    ],
)
async def test_an_older_or_malformed_owner_is_refused(said: broker_pb2.CoreOwner) -> None:
    ready: list[bool] = []
    async with shard_brokers(2) as (_, [own, owner]), core_connection_of(own.address, ready) as core:
        core.follow(broker_pb2.CoreOwner(address=owner.address, epoch=5))
        await until(lambda: core.is_away)
        connecting = core._connecting
        core.follow(said)
        assert core._connecting is connecting
        assert core.is_away
