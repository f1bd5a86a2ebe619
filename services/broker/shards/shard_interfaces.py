"""How a run's core and its token shards reach each other, in this process or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations.chunk_rules import Accepted
from services.broker.records.token_tails import SealRequest, TailReport
from services.broker.records_pb2 import SampleTail


class TokenShards(Protocol):
    """How a core reaches its shards.

    Every call may be repeated. Raises ServiceUnavailableError if the shard, or its store, cannot be reached: what was
    asked may or may not have been done.
    """

    async def seal(self, run_id: str, shard: int, samples: Sequence[SealRequest]) -> list[SampleTail]:
        """End leases: nothing more is accepted under them. Returns what is stored of each sample, in order."""
        ...

    async def accept(self, run_id: str, shard: int, generator_id: str, chunks: Sequence[ChunkFacts]) -> Accepted:
        """Store chunks; those that end a sample are known to the core as well when this returns.

        Raises UnknownRunError, RunClosedError.
        """
        ...


class Core(Protocol):
    """How a shard reaches its run."""

    async def report(self, run_id: str, shard: int, reports: Sequence[TailReport]) -> None:
        """Tell what samples have now; one that ended (`finish_reason`) is committed when this returns.

        Reports of other shards than `shard` name theirs. What the core knows better by now is ignored. Every call may
        be repeated. Raises ServiceUnavailableError if the core, or its store, cannot be reached, and UnknownRunError.
        """
        ...
