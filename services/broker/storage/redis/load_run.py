"""Reads a run from Redis: changes since a mark by one script, everything in slices of about a millisecond."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ServiceUnavailableError
from services.broker.records.run_clock import MAX_GAP_S, Reading
from services.broker.records.store import MAX_CHANGED_BYTES, LostMarkError, Mark, Snapshot
from services.broker.storage.redis.keys import RunKeys
from services.broker.storage.redis.redis_connection import RedisConnection, Script

SLICE_BYTES = 1024 * 1024
"""Bytes of records read at once."""
SLICE_RECORDS = 100
"""Records read at once while their size is unknown; Redis may return more of a small hash."""
MAX_SLICE_RECORDS = 1_000
MAX_SCANS = 5
CHANGES_EVERY_S = 0.1
"""How often the changes since the scan began are read: before they are too many to be read at once."""


class RedisLoad:
    """See `Store.load`."""

    def __init__(self, connection: RedisConnection, *, num_wait_replicas: int) -> None:
        self._redis = connection
        self._script = Script("clock", "load", num_replicas=num_wait_replicas)

    async def changes(self, run_id: str, since: Mark) -> Snapshot | None:
        """The changes since a mark. None: no such run. Raises LostMarkError."""
        keys = RunKeys(run_id)
        script_keys = [keys.run, keys.marks, keys.changed, keys.groups]
        args: list[str | int] = [since.revision, since.name, round(MAX_GAP_S * 1e6), MAX_CHANGED_BYTES]
        reply: list[Any] | None = await self._redis.read(
            lambda redis: self._script.run(redis, keys=script_keys, args=args)
        )
        if not reply:
            return None
        if reply[3]:
            raise LostMarkError(run_id)
        names = [raw.decode() for raw in reply[7::2]]
        return Snapshot(
            mark=Mark(int(reply[0]), reply[1].decode()),
            is_full=False,
            run=reply[2],
            groups={name: record or None for name, record in zip(names, reply[8::2], strict=True)},
            clock=reading_of(reply[4:7]),
        )

    async def everything(self, run_id: str) -> Snapshot | None:
        """All of a run. None: no such run. Raises ServiceUnavailableError."""
        for _ in range(MAX_SCANS):
            try:
                return await self._scanned(run_id)
            except LostMarkError:
                continue
        raise ServiceUnavailableError(f"run {run_id!r} changed too much while it was read, {MAX_SCANS} times")

    async def _scanned(self, run_id: str) -> Snapshot | None:
        """Every record, slice by slice, with the changes since then now and again.

        Later reads replace earlier ones, and after the last slice all changes are read: wherever in the scan a change
        falls, the records are those of one commit.
        """
        keys = RunKeys(run_id)
        root: Any = await self._redis.read(lambda redis: redis.hmget(keys.run, ["revision", "name", "record"]))
        if root[0] is None:
            return None
        mark, run = Mark(int(root[0]), root[1].decode()), root[2]
        records: dict[str, bytes] = {}
        cursor, num_records, changes_s = 0, SLICE_RECORDS, time.monotonic() + CHANGES_EVERY_S
        while True:
            cursor, found = await scan(self._redis, keys.groups, cursor, num_records)
            records.update((name.decode(), record) for name, record in found.items())
            num_records = _slice_records(found) or num_records
            if cursor and time.monotonic() < changes_s:
                continue
            changes_s = time.monotonic() + CHANGES_EVERY_S
            changed = await self.changes(run_id, mark)
            if changed is None:
                return None
            for name, record in changed.groups.items():
                records.pop(name, None)
                if record is not None:
                    records[name] = record
            mark, run = changed.mark, changed.run or run
            if not cursor:
                return Snapshot(mark=mark, is_full=True, run=run, groups=records, clock=changed.clock)


async def scan(connection: RedisConnection, key: str, cursor: int, count: int) -> tuple[int, dict[bytes, bytes]]:
    """About `count` fields of a hash, and where to continue; 0 at the end."""
    found: Any = await connection.read(lambda redis: redis.hscan(key, cursor=cursor, count=count))
    return int(found[0]), found[1]


def reading_of(reply: Sequence[bytes]) -> Reading:
    """The run's clock, from microseconds as text."""
    now_s, since_s, heard_s = (int(microseconds) / 1e6 for microseconds in reply)
    return Reading(now_s=now_s, unbroken_since_s=since_s, heard_s=heard_s)


def _slice_records(found: Mapping[bytes, bytes]) -> int:
    """Number of records like these in a slice; 0 if there are none."""
    num_bytes = sum(map(len, found.values()))
    return min(MAX_SLICE_RECORDS, len(found) * SLICE_BYTES // num_bytes + 1) if num_bytes else 0
