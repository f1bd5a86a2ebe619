"""Tells the sender on one token stream which brokers own its shards, and refuses one that never listens."""

from __future__ import annotations

from penstock.errors import ServiceUnavailableError, WrongOwnerError
from penstock.names import check_run_id
from penstock.v1 import broker_pb2
from services.broker.brokers.shard_maps import ShardMaps
from services.broker.runtime.metrics import BrokerMetrics

MAX_MISDIRECTED = 256
"""Requests in a row, to a broker that owns none of their shards, of a sender that was shown the owners."""


class ShardHints:
    """What one stream was shown.

    Args:
        maps: The maps of runs; None if this broker knows of no others.
        metrics: Counts requests that came to the wrong broker.
    """

    def __init__(self, maps: ShardMaps | None, metrics: BrokerMetrics) -> None:
        self._maps, self._metrics = maps, metrics
        self._sent_epoch = 0
        self._num_misdirected = 0

    async def look(self, request: broker_pb2.StreamTokensRequest) -> broker_pb2.ShardMap | None:
        """The map of the request's run if the sender has to hear it. Raises WrongOwnerError."""
        if self._maps is None or not request.chunks or not request.chunks[0].token_shard:
            return None
        check_run_id(request.run_id)
        shards = {chunk.token_shard for chunk in request.chunks} - {0}
        try:
            found = await self._maps.of(request.run_id)
        except ServiceUnavailableError:
            # Said, where it matters, by what becomes of the chunks.
            return None
        is_news, self._sent_epoch = found.epoch != self._sent_epoch, found.epoch
        owners = {found.addresses[found.owners[shard - 1]] for shard in shards if shard <= len(found.owners)}
        if found.here in owners or not owners:
            self._num_misdirected = 0
        else:
            self._note_misdirected(request, min(owners), is_news=is_news)
        return found if is_news else None

    def _note_misdirected(self, request: broker_pb2.StreamTokensRequest, owner: str, *, is_news: bool) -> None:
        self._metrics.misdirected.inc()
        self._num_misdirected = 0 if is_news or request.must_pass_on else self._num_misdirected + 1
        if self._num_misdirected > MAX_MISDIRECTED:
            raise WrongOwnerError(
                f"chunks: {MAX_MISDIRECTED} requests of {request.generator_id!r} in a row have only chunks of token "
                f"shards that {owner} owns; send them there, or say must_pass_on if it cannot be reached",
                owner=owner,
            )
