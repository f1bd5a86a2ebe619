"""What a fault of a store leaves behind, written into a real Redis while no broker runs: no code lets it come about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import redis

from services.broker.records_pb2 import RunRecord
from services.broker.storage.redis.keys import PREFIX, RunKeys


def change_record(url: str, run_id: str, change: Callable[[RunRecord], None]) -> None:
    """Change a run's root record as a broker has stored it."""
    key = RunKeys(run_id).run
    with closing(redis.Redis.from_url(url)) as client:
        stored = client.hget(key, "record")
        assert isinstance(stored, bytes), f"{key} has no record"
        record = RunRecord.FromString(stored)
        change(record)
        client.hset(key, "record", record.SerializeToString())


def lose_shards(url: str, run_id: str) -> None:
    """Delete the run's token shards, as a node of a Cluster does that starts empty."""
    with closing(redis.Redis.from_url(url)) as client:
        own = f"{PREFIX}:{{{run_id}}}:".encode()
        lost = [key for key in client.scan_iter(f"{PREFIX}:{{{run_id}*") if not key.startswith(own)]
        assert lost, f"run {run_id} has no shards"
        client.delete(*lost)
