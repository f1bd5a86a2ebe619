"""Brokers that only take tokens of shards: each stores what it gets in one place, and says who owns what as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ServiceUnavailableError
from penstock.network import rpc
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import int32_array


@dataclass
class Shards:
    """What all of the brokers see."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    """By lease."""
    brokers: list[ScriptedShardBroker] = field(default_factory=list)
    epoch: int = 1
    owners: list[str] = field(default_factory=list)
    """Address by shard, from shard 1 on."""

    def own(self, *addresses: str) -> None:
        """Say who owns which shard, from shard 1 on."""
        self.owners, self.epoch = list(addresses), self.epoch + 1

    def map_at(self, here: str) -> broker_pb2.ShardMap:
        """The map as a broker tells it."""
        addresses = sorted(set(self.owners))
        numbers = [addresses.index(owner) for owner in self.owners]
        return broker_pb2.ShardMap(epoch=self.epoch, addresses=addresses, owners=numbers, here=here)

    def store(self, chunk: types_pb2.TokenChunk) -> broker_pb2.ChunkError | None:
        """Store a chunk exactly once, as a broker does."""
        tokens, ids = self.tokens.setdefault(chunk.lease_id, []), int32_array(chunk.token_ids, "token_ids").tolist()
        if chunk.offset + len(ids) <= len(tokens):
            return None
        if chunk.offset != len(tokens):
            return broker_pb2.ChunkError(
                lease_id=chunk.lease_id, reason="OFFSET_MISMATCH", next_offset=len(tokens), message="lost or doubled"
            )
        tokens += ids
        return None


class ScriptedShardBroker(broker_pb2_grpc.BrokerServiceServicer):
    """One of them."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.address = ""
        self.server: rpc.Server | None = None
        self.requests: list[broker_pb2.StreamTokensRequest] = []
        self.hangs = False
        """Whether it answers nothing, as a stopped process."""
        self.is_cut = False
        """Whether it answers that its store is away."""
        self.num_asked = 0

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.is_cut:
            raise ServiceUnavailableError("its way to the store is cut")

    async def StreamTokens(
        self, request_iterator: AsyncIterator[broker_pb2.StreamTokensRequest], context: Any
    ) -> AsyncIterator[broker_pb2.StreamTokensResponse]:
        """Store everything."""
        told = 0
        async for request in request_iterator:
            await self._answer()
            self.requests.append(request)
            errors = [error for error in map(self.shards.store, request.chunks) if error is not None]
            response = broker_pb2.StreamTokensResponse(sequence=request.sequence, errors=errors)
            if told != self.shards.epoch and self.shards.owners:
                told = self.shards.epoch
                response.shard_map.CopyFrom(self.shards.map_at(self.address))
            yield response

    async def GetShardMap(self, request: broker_pb2.GetShardMapRequest, context: Any) -> broker_pb2.GetShardMapResponse:
        """The map."""
        self.num_asked += 1
        await self._answer()
        return broker_pb2.GetShardMapResponse(shard_map=self.shards.map_at(self.address))


@asynccontextmanager
async def shard_brokers(count: int) -> AsyncIterator[tuple[Shards, list[ScriptedShardBroker]]]:
    """So many brokers, on free ports."""
    shards = Shards()
    async with AsyncExitStack() as stack:
        for _ in range(count):
            broker = ScriptedShardBroker(shards)
            broker.server = rpc.Server(listen="127.0.0.1:0", services=[rpc.service_of(broker)])
            broker.address = f"127.0.0.1:{await broker.server.start()}"
            stack.push_async_callback(broker.server.stop, grace_s=0)
            shards.brokers.append(broker)
        yield shards, shards.brokers
