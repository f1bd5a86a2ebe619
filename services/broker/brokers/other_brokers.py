"""Calls other brokers: one channel to each, with this process's own credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.network import rpc
from penstock.network.connection import Connection
from penstock.security import Security
from penstock.v1 import shards_pb2, shards_pb2_grpc
from services.broker.brokers import shard_messages
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations.chunk_rules import Accepted
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.records_pb2 import SampleTail

CALL_TIMEOUT_S = 10.0
"""Longer than a broker takes to give up a transaction, which it then says."""


class OtherBroker(Connection):
    """The shards and cores of another broker: `TokenShards` and `Core` over the network. Each call is made once."""

    def __init__(self, address: str, security: Security) -> None:
        super().__init__(address, security=security)
        self._stub = shards_pb2_grpc.ShardServiceStub(self.channel)

    async def accept(self, run_id: str, shard: int, generator_id: str, chunks: Sequence[ChunkFacts]) -> Accepted:
        """See `TokenShards.accept`."""
        request = shards_pb2.AcceptChunksRequest(
            run_id=run_id, token_shard=shard, sender_id=generator_id, chunks=map(shard_messages.chunk_message, chunks)
        )
        response = await rpc.call(self._stub.AcceptChunks, request, peer=self.peer, timeout_s=CALL_TIMEOUT_S)
        return shard_messages.read_accepted(response, chunks)

    async def seal(self, run_id: str, shard: int, samples: Sequence[SealRequest]) -> list[SampleTail]:
        """See `TokenShards.seal`."""
        tails: list[bytes] = []
        for start in range(0, len(samples), shard_messages.MAX_SAMPLES):
            part = samples[start : start + shard_messages.MAX_SAMPLES]
            request = shards_pb2.SealLeasesRequest(
                run_id=run_id, token_shard=shard, leases=map(shard_messages.lease_message, part)
            )
            response = await rpc.call(self._stub.SealLeases, request, peer=self.peer, timeout_s=CALL_TIMEOUT_S)
            tails += response.tails
        return shard_messages.read_tails(tails, len(samples))

    async def report(self, run_id: str, shard: int, reports: Sequence[TailReport]) -> None:
        """See `Core.report`."""
        for start in range(0, len(reports), shard_messages.MAX_SAMPLES):
            part = reports[start : start + shard_messages.MAX_SAMPLES]
            request = shards_pb2.ReportTailsRequest(
                run_id=run_id, token_shard=shard, reports=map(shard_messages.report_message, part)
            )
            await rpc.call(self._stub.ReportTails, request, peer=self.peer, timeout_s=CALL_TIMEOUT_S)


class OtherBrokers:
    """The brokers that this one calls, by address, each from its first call on."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._brokers: dict[str, OtherBroker] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def at(self, address: str) -> OtherBroker:
        """The broker at an address."""
        broker = self._brokers.get(address)
        if broker is None:
            broker = self._brokers[address] = OtherBroker(address, self._security)
        return broker

    def keep_only(self, addresses: set[str]) -> None:
        """Close the channels to all other brokers, which are gone."""
        for address in self._brokers.keys() - addresses:
            task = asyncio.create_task(self._brokers.pop(address).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels."""
        await asyncio.gather(*(broker.close() for broker in self._brokers.values()))
