"""Names every Redis key of the broker.

All keys of a run carry its id as the hash tag, so that they share a slot of Redis Cluster and one script may touch
them; so do those of a token shard, whose tag is chosen so that a run's shards lie in slots far from each other.
"""

from __future__ import annotations

import binascii
from functools import lru_cache
from itertools import count

from services.broker.records.shard_ids import is_shard_id, run_and_shard
from services.broker.records.store import SampleId

PREFIX = "penstock"
NUM_SLOTS = 16_384
_NEAR = 64
"""How far from its place a shard's slot may be."""


def slot_of(tag: str) -> int:
    """The slot of Redis Cluster that keys with this hash tag have: their CRC-16 (XMODEM)."""
    return binascii.crc_hqx(tag.encode(), 0) % NUM_SLOTS


@lru_cache(maxsize=4_096)
def spread_tag(document_id: str) -> str:
    """The hash tag of a token shard.

    Masters have ranges of slots. By hash alone one of three would often get half of a run's shards; places by van der
    Corput's sequence keep any number of shards even over any ranges.
    """
    run_id, shard = run_and_shard(document_id)
    place = (_radical_inverse(shard - 1) * NUM_SLOTS + slot_of(run_id)) % NUM_SLOTS
    tags = (f"{document_id}.{number}" for number in count())
    return next(tag for tag in tags if (slot_of(tag) - place + _NEAR) % NUM_SLOTS <= 2 * _NEAR)


def _radical_inverse(number: int) -> float:
    """The number's binary digits mirrored at the point: 0, 1/2, 1/4, 3/4, 1/8, ..."""
    inverse, weight = 0.0, 0.5
    while number:
        number, digit = divmod(number, 2)
        inverse, weight = inverse + digit * weight, weight / 2
    return inverse


class RunKeys:
    """The keys of one run, or of one of its token shards."""

    def __init__(self, run_id: str) -> None:
        base = f"{PREFIX}:{{{spread_tag(run_id) if is_shard_id(run_id) else run_id}}}"
        self.run = f"{base}:run"
        """Hash: revision, name (of the last commit), record (RunRecord); of the run's clock: clock_at (time of the
        machine when it was last advanced), clock_lead (how far it is ahead of that), clock_since (end of its last gap),
        microseconds; brokers (JSON: the run's times of the last two advances of each that serves it, as text)."""
        self.marks = f"{base}:marks"
        """Sorted set: names of the last commits by revision."""
        self.changed = f"{base}:changed"
        """Sorted set: group ids by the revision that last changed them."""
        self.groups = f"{base}:groups"
        """Hash: GroupRecord by group id."""
        self.prompts = f"{base}:prompts"
        """Hash: Prompt by group id."""
        self.retired = f"{base}:retired"
        """Set: ids of groups whose records are gone."""
        self.retired_earlier = f"{base}:retired:earlier"
        """Set: the same of those before them, up to the last time that `retired` was full."""
        self.books = f"{base}:books"
        """Hash: audit counter by name."""
        self.peers = f"{base}:peers"
        """Hash: GeneratorView by peer id."""
        self._chunks = f"{base}:chunks"
        self._spans = f"{base}:spans"
        self._payload = f"{base}:payload"

    @property
    def fixed(self) -> list[str]:
        """Every key of the run whose name contains only the run's id; `run` first."""
        records = [self.run, self.marks, self.changed, self.groups, self.prompts, self.retired, self.retired_earlier]
        return [*records, self.books, self.peers]

    def chunks(self, sample: SampleId) -> str:
        """List: TokenChunk of one sample, in order."""
        return f"{self._chunks}:{sample[0]}:{sample[1]}"

    def payload(self, payload_id: str) -> str:
        """String: the TrajectoryGroups of one put."""
        return f"{self._payload}:{payload_id}"

    def spans(self, peer_id: str) -> str:
        """List: TimeSpan of one peer, oldest first."""
        return f"{self._spans}:{peer_id}"


RUNS = f"{PREFIX}:runs"
"""Sorted set: run ids by the time they were opened."""
ROLL = f"{PREFIX}:{{#brokers}}:roll"
"""Hash: the roll of the brokers: epoch, and by "b:" and name what each said, its process, and when, in microseconds."""
SHARDS = f"{PREFIX}:{{#brokers}}:shards"
"""Hash: number of token shards by run id, of open runs that have any."""
PROBE = f"{PREFIX}:probe"
"""String written to test whether Redis accepts writes."""
