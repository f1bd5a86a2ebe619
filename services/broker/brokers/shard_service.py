"""Implements ShardService: what other brokers ask of the shards and cores that this one owns, carried out here."""

from __future__ import annotations

from typing import Any

import grpc

from penstock.v1 import shards_pb2, shards_pb2_grpc
from services.broker.brokers import shard_messages
from services.broker.ingest.token_chunk import read_chunks
from services.broker.shards.shard_interfaces import Core, TokenShards

_Context = grpc.aio.ServicerContext[Any, Any]


class ShardService(shards_pb2_grpc.ShardServiceServicer):
    """See shards.proto. No call is passed on again, even if the shard has moved: a store's commits keep it exact.

    Args:
        shards: The token shards, in this process.
        core: The cores, in this process.
    """

    def __init__(self, shards: TokenShards, core: Core) -> None:
        self._shards, self._core = shards, core

    async def AcceptChunks(
        self, request: shards_pb2.AcceptChunksRequest, context: _Context
    ) -> shards_pb2.AcceptChunksResponse:
        """Store chunks that were passed on."""
        shard_messages.check_call(request)
        chunks = read_chunks(request.chunks)
        accepted = await self._shards.accept(request.run_id, request.token_shard, request.sender_id, chunks)
        return shard_messages.accepted_response(accepted, chunks)

    async def SealLeases(
        self, request: shards_pb2.SealLeasesRequest, context: _Context
    ) -> shards_pb2.SealLeasesResponse:
        """Seal leases of a shard."""
        shard_messages.check_call(request)
        samples = [shard_messages.read_lease(lease) for lease in request.leases]
        tails = await self._shards.seal(request.run_id, request.token_shard, samples)
        return shards_pb2.SealLeasesResponse(tails=[tail.SerializeToString() for tail in tails])

    async def ReportTails(
        self, request: shards_pb2.ReportTailsRequest, context: _Context
    ) -> shards_pb2.ReportTailsResponse:
        """Tell a core what a shard has."""
        shard_messages.check_call(request)
        reports = [shard_messages.read_report(report) for report in request.reports]
        await self._core.report(request.run_id, request.token_shard, reports)
        return shards_pb2.ReportTailsResponse()
