"""Names every Redis key of the broker.

All keys of a run carry its id as the hash tag, so that they share a slot of Redis Cluster and one script may touch
them.
"""

from __future__ import annotations

from services.broker.records.store import SampleId

PREFIX = "penstock"


class RunKeys:
    """The keys of one run."""

    def __init__(self, run_id: str) -> None:
        base = f"{PREFIX}:{{{run_id}}}"
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
        return [self.run, self.marks, self.changed, self.groups, self.prompts, self.retired, self.books, self.peers]

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
