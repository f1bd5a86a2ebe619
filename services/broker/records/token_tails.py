"""What a run and its token shards say to each other about samples under way."""

from __future__ import annotations

from dataclasses import dataclass

from services.broker.records.store import SampleId
from services.broker.records_pb2 import SampleTail


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRequest:
    """A lease that has ended, of which the core asks what was stored under it."""

    group_id: str
    sample_index: int
    lease_id: str
    attempt: int

    @property
    def sample(self) -> SampleId:
        """The sample it names."""
        return self.group_id, self.sample_index


@dataclass(frozen=True, slots=True, kw_only=True)
class TailReport:
    """What a shard has of a sample."""

    group_id: str
    sample_index: int
    tail: SampleTail
    token_shard: int = 0
    """Which shard; 0 for the one that the call names."""

    @property
    def sample(self) -> SampleId:
        """The sample it names."""
        return self.group_id, self.sample_index
