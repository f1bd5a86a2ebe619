"""Deletes a run from Redis: in slices that take Redis about a millisecond each, and only while it is unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from services.broker.records.shard_ids import is_shard_id
from services.broker.records.store import ConflictError, Mark
from services.broker.records_pb2 import ShardGroup
from services.broker.state.batches import head_of, read_record
from services.broker.state.other_records import is_group, is_session
from services.broker.storage.redis.keys import RUNS, RunKeys
from services.broker.storage.redis.load_run import scan
from services.broker.storage.redis.redis_connection import RedisConnection, Script

SLICE_RECORDS = 100
"""Records requested at once; Redis may return more of a small hash."""
SLICE_KEYS = 500
"""Keys deleted by one command; their memory is freed in the background (UNLINK)."""


class RedisPurge:
    """See `Store.purge` and `Store.delete`."""

    def __init__(self, connection: RedisConnection, *, num_wait_replicas: int) -> None:
        self._redis = connection
        self._purge = Script("purge", num_replicas=num_wait_replicas)
        self._delete = Script("delete", num_replicas=num_wait_replicas)

    async def purge(self, run_id: str, expected: Mark) -> AsyncIterator[int]:
        """See `Store.purge`."""
        keys, cursor, is_over = RunKeys(run_id), 0, False
        payload_of = _shard_keys if is_shard_id(run_id) else _keys
        while not is_over:
            cursor, records = await scan(self._redis, keys.groups, cursor, SLICE_RECORDS)
            is_over = cursor == 0
            names = [name.decode() for name in records]
            payload = [
                key
                for name, record in zip(names, records.values(), strict=True)
                for key in payload_of(keys, name, record)
            ]
            for start in range(0, len(payload), SLICE_KEYS):
                part = payload[start : start + SLICE_KEYS]
                await self._cut(run_id, expected, part, ())
                yield len(part)
            # Last, so that an interrupted deletion can still find the keys of these records.
            for start in range(0, len(names), SLICE_KEYS):
                some = names[start : start + SLICE_KEYS]
                await self._cut(run_id, expected, (), some)
                yield len(some)
        await self._cut(run_id, expected, (keys.prompts, keys.retired, keys.retired_earlier), ())

    async def _cut(self, run_id: str, expected: Mark, payload: Sequence[str], names: Sequence[str]) -> None:
        keys = RunKeys(run_id)
        script_keys = [keys.run, keys.groups, *payload]
        args: list[str | int] = [expected.revision, expected.name, *names]
        if not await self._redis.write(lambda redis: self._purge.run(redis, keys=script_keys, args=args)):
            raise ConflictError(run_id)

    async def delete(self, run_id: str, expected: Mark | None) -> None:
        """See `Store.delete`."""
        keys = RunKeys(run_id)
        peers: Any = await self._redis.read(lambda redis: redis.hkeys(keys.peers))
        script_keys = [*keys.fixed, *(keys.spans(peer.decode()) for peer in peers)]
        args = [str(expected.revision), expected.name] if expected else ["", ""]
        # First: a run opened under this id after the keys are gone registers itself.
        await self._redis.write(lambda redis: redis.zrem(RUNS, run_id))
        if not await self._redis.write(lambda redis: self._delete.run(redis, keys=script_keys, args=args)):
            raise ConflictError(run_id)


def _keys(keys: RunKeys, name: str, record: bytes) -> list[str]:
    """The payload keys of a record; none if it cannot be read."""
    try:
        if is_session(name):
            return [keys.chunks((name, 0))]
        if not is_group(name):
            return []
        group = read_record(name, record, head_of(record))
        if group.HasField("put"):
            return [keys.payload(group.put.payload_id)]
        return [keys.chunks((name, index)) for index in range(len(group.samples))]
    except DecodeError:
        return []


def _shard_keys(keys: RunKeys, name: str, record: bytes) -> list[str]:
    """The same of a token shard's record."""
    try:
        return [keys.chunks((name, index)) for index in range(ShardGroup.FromString(record).num_samples)]
    except DecodeError:
        return []
