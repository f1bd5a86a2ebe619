"""The token streams: chunks in, one answer a request, after the store has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.errors import RunClosedError
from penstock.v1 import broker_pb2
from services.broker import generation
from services.broker.chunks import read_chunk
from services.broker.hubs import Hubs
from services.broker.run_state import RunState
from services.broker.validation import MAX_CHUNKS, check_bytes, check_count, check_id, check_run_id


async def serve_tokens(
    hubs: Hubs, requests: AsyncIterator[broker_pb2.StreamTokensRequest]
) -> AsyncIterator[broker_pb2.StreamTokensResponse]:
    """Answer each request in turn; one commit holds all its chunks. Ends with RUN_CLOSED once the run is closed."""
    async for request in requests:
        hubs.check_serving()
        yield await accept(hubs, request)


async def accept(hubs: Hubs, request: broker_pb2.StreamTokensRequest) -> broker_pb2.StreamTokensResponse:
    """Store the chunks of one request."""
    check_run_id(request.run_id)
    check_id("generator_id", request.generator_id)
    check_count("chunks", len(request.chunks), MAX_CHUNKS)
    check_bytes("chunks", request.ByteSize())
    hub = hubs.hub(request.run_id)
    generator_id = request.generator_id
    chunks = [read_chunk(chunk) for chunk in request.chunks]

    def operation(state: RunState) -> list[broker_pb2.ChunkError]:
        if state.run.is_closed:
            raise RunClosedError(f"run {state.run.run_id!r} is closed", run_id=state.run.run_id)
        return generation.accept_chunks(state, generator_id, chunks, hub.clock.now_s())

    errors = await hub.transact(operation)
    for error in errors:
        hubs.metrics.count_refused(error.reason)
    hubs.metrics.count_tokens(sum(chunk.num_tokens for chunk in chunks))
    return broker_pb2.StreamTokensResponse(sequence=request.sequence, errors=errors)
