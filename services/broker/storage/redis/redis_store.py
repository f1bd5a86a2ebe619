"""Stores runs in Redis: one Lua script per commit, one per load of changes. Needs Redis 6.2 or newer.

Durability is Redis' own: with append-only persistence every answered commit survives a restart, except those
that the fsync policy may lose (a second, by default). A broker detects lost commits by the name of the commit it last
saw, and loads everything again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.wire.codec import Packed
from services.broker.records.roll import Broker, Roll
from services.broker.records.run_clock import BROKER_LIFE_S, MOST_BEHIND_S, Reading
from services.broker.records.shard_ids import is_shard_id
from services.broker.records.store import (
    MARKS_KEPT,
    MAX_BUSY_SPANS,
    MIN_RETIRED_KEPT,
    ConflictError,
    Delta,
    Mark,
    PayloadSlice,
    Replacement,
    RetiredError,
    Root,
    SampleId,
    Snapshot,
)
from services.broker.storage.redis.authentication import NO_CREDENTIALS, RedisCredentials
from services.broker.storage.redis.delete_run import RedisPurge
from services.broker.storage.redis.keys import PROBE, RUNS, RunKeys
from services.broker.storage.redis.load_run import RedisLoad, reading_of
from services.broker.storage.redis.redis_connection import RedisConnection, Script, exchange, pipelined
from services.broker.storage.redis.redis_roll import RedisRoll

PROBE_TTL_MS = 60_000

PEERS_LIFE_S = 86_400
"""How long silent peers are kept."""
ORPHAN_LIFE_S = 600
"""How long payload without a commit is kept."""

PAYLOAD_PART_BYTES = 8 * 1024 * 1024
"""Bytes of a large payload written by one call."""


class RedisStore:
    """A `Store` in Redis; see `Store` for its promises."""

    def __init__(self, connection: RedisConnection, *, num_wait_replicas: int = 0) -> None:
        """`num_wait_replicas`: nothing is answered before this many replicas have the writes it depends on."""
        self._redis = connection
        self._num_wait_replicas = num_wait_replicas
        self._load = RedisLoad(connection, num_wait_replicas=num_wait_replicas)
        self._tick = Script("clock", "tick", num_replicas=num_wait_replicas)
        self._books = Script("books", num_replicas=num_wait_replicas)
        self._commit = Script("commit", num_replicas=num_wait_replicas)
        self._replace = Script("replace", num_replicas=num_wait_replicas)
        self._now = Script("now")
        self._put_peers = Script("peers")
        self._roll = RedisRoll(connection)
        self._purge = RedisPurge(connection, num_wait_replicas=num_wait_replicas)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        credentials: RedisCredentials = NO_CREDENTIALS,
        num_wait_replicas: int = 0,
        on_fault: Callable[[str], None] = lambda _kind: None,
    ) -> RedisStore:
        """Connects on first use; see `address` for the forms of the URL, `RedisConnection` for `on_fault`."""
        connection = RedisConnection.from_url(url, credentials=credentials, on_fault=on_fault)
        return cls(connection, num_wait_replicas=num_wait_replicas)

    async def load(self, run_id: str, since: Mark | None) -> Snapshot | None:
        """See `Store.load`."""
        return await (self._load.everything(run_id) if since is None else self._load.changes(run_id, since))

    async def tick(
        self, run_id: str, max_gap_s: float, *, broker: str = "", is_leaving: bool = False, is_behind: bool = False
    ) -> Reading:
        """See `Store.tick`."""
        args: list[str | int] = [
            *(round(max_gap_s * 1e6), round(BROKER_LIFE_S * 1e6), broker, int(is_leaving)),
            round(MOST_BEHIND_S * 1e6) if is_behind else "",
        ]
        reply = await self._redis.write(lambda redis: self._tick.run(redis, keys=[RunKeys(run_id).run], args=args))
        return reading_of(reply)

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        """See `Store.commit`."""
        keys = RunKeys(run_id)
        lists = {
            sample: position for position, sample in enumerate(dict.fromkeys([item[0] for item in delta.chunks]), 1)
        }
        name = secrets.token_hex(8)
        args: list[bytes | str | int] = [
            *((expected.revision, expected.name) if expected else (0, "")),
            *(name, delta.run, MARKS_KEPT),
            *(len(delta.groups), len(delta.prompts), len(delta.retired), len(delta.chunks), len(lists)),
            *(len(delta.counts), "" if delta.fold_version is None else delta.fold_version),
            *(len(delta.fresh), len(delta.payloads), MIN_RETIRED_KEPT),
            *delta.fresh,
        ]
        for mapping in (delta.groups, delta.prompts):
            for group_id, value in mapping.items():
                args += [group_id, value or b""]
        args += delta.retired
        if len(lists) == len(delta.chunks):
            # The common case: no sample has two, so that they need no positions.
            args += [chunk for _sample, chunk in delta.chunks]
        else:
            for sample, chunk in delta.chunks:
                args += [lists[sample], chunk]
        for counter, count in delta.counts.items():
            args += [counter, count]
        script_keys = [keys.run, keys.marks, keys.changed, keys.groups, keys.prompts, keys.retired, keys.books]
        script_keys.append(keys.retired_earlier)
        script_keys += [keys.payload(payload_id) for payload_id in delta.payloads]
        script_keys += [keys.chunks(sample) for sample in (*lists, *delta.cleared)]
        script_keys += [keys.payload(payload_id) for payload_id in delta.dropped_payloads]
        if expected is None and not is_shard_id(run_id):
            await self._redis.write(lambda redis: redis.zadd(RUNS, {run_id: time.time()}, nx=True))
        # Payload is sent ahead of the commit that makes it durable, and expires without one. Existing payload is never
        # overwritten: a late repetition would give committed payload an expiry again.
        ahead = [
            ("SET", keys.payload(name), data, "EX", ORPHAN_LIFE_S, "NX")
            for name, data in delta.payloads.items()
            if data
        ]
        # Safe to repeat after a lost answer: the script recognises a stored commit by its name.
        revision = await self._redis.write(partial(self._commit.run, keys=script_keys, args=args, ahead=ahead))
        if revision is None:
            raise ConflictError(run_id)
        if isinstance(revision, list):
            raise RetiredError([delta.fresh[int(position) - 1] for position in revision])
        return Mark(int(revision), name)

    async def put_payload(self, run_id: str, payload_id: str, payload: Packed) -> None:
        """See `Store.put_payload`. In parts, each within a call's deadline; safe to repeat."""
        key = RunKeys(run_id).payload(payload_id)
        for start in range(0, len(payload), PAYLOAD_PART_BYTES):
            part = payload[start : start + PAYLOAD_PART_BYTES]
            # Created before every part, so that none ever exists without an expiry.
            commands = [("SET", key, b"", "EX", ORPHAN_LIFE_S, "NX"), ("SETRANGE", key, start, part)]
            await self._redis.write(partial(pipelined, commands=commands))

    async def payloads(self, run_id: str, slices: Sequence[PayloadSlice]) -> list[bytes]:
        """See `Store.payloads`."""
        if not slices:
            return []
        keys = RunKeys(run_id)
        commands = [("GETRANGE", keys.payload(part.payload_id), part.start, part.end - 1) for part in slices]
        return await self._redis.read(partial(pipelined, commands=commands))

    async def records(self, run_id: str, names: Sequence[str]) -> list[bytes | None]:
        """See `Store.records`."""
        if not names:
            return []
        found: list[Any] = await self._redis.read(lambda redis: redis.hmget(RunKeys(run_id).groups, list(names)))
        return found

    async def prompts(self, run_id: str, group_ids: Sequence[str]) -> list[bytes | None]:
        """See `Store.prompts`."""
        if not group_ids:
            return []
        found: list[Any] = await self._redis.read(lambda redis: redis.hmget(RunKeys(run_id).prompts, list(group_ids)))
        return found

    async def chunks(self, run_id: str, samples: Sequence[SampleId]) -> list[list[bytes]]:
        """See `Store.chunks`."""
        if not samples:
            return []
        keys = RunKeys(run_id)
        commands = [("LRANGE", keys.chunks(sample), 0, -1) for sample in samples]
        return await self._redis.read(partial(pipelined, commands=commands))

    async def replace_chunks(self, run_id: str, replacements: Sequence[Replacement]) -> list[bool]:
        """See `Store.replace_chunks`."""
        if not replacements:
            return []
        keys = RunKeys(run_id)
        script_keys = [keys.groups, *(keys.chunks(sample) for each in replacements for sample in each.chunks)]
        args: list[bytes | str | int] = []
        for each in replacements:
            args += [each.name, each.record, len(each.chunks), *each.chunks.values()]
        flags = await self._redis.write(lambda redis: self._replace.run(redis, keys=script_keys, args=args))
        return [bool(flag) for flag in flags]

    async def books(self, run_id: str) -> tuple[Mark, Mapping[str, int]] | None:
        """See `Store.books`."""
        keys = RunKeys(run_id)
        reply: list[Any] | None = await self._redis.read(
            lambda redis: self._books.run(redis, keys=[keys.run, keys.books], args=[])
        )
        if not reply:
            return None
        counts = {name.decode(): int(count) for name, count in zip(reply[2::2], reply[3::2], strict=True)}
        return Mark(int(reply[0]), reply[1].decode()), counts

    async def retired(self, run_id: str, group_ids: Sequence[str]) -> set[str]:
        """See `Store.retired`."""
        if not group_ids:
            return set()
        keys = RunKeys(run_id)
        commands = [("SMISMEMBER", key, *group_ids) for key in (keys.retired, keys.retired_earlier)]
        newer, earlier = await self._redis.read(partial(pipelined, commands=commands))
        return {group_id for group_id, *flags in zip(group_ids, newer, earlier, strict=True) if any(flags)}

    async def put_peers(
        self, run_id: str, views: Mapping[str, bytes], busy_spans: Mapping[str, Sequence[bytes]]
    ) -> None:
        """See `Store.put_peers`."""
        keys = RunKeys(run_id)
        # A peer unaware that its run was deleted leaves nothing permanent.
        args: list[bytes | str | int] = [PEERS_LIFE_S, MAX_BUSY_SPANS, len(views)]
        for peer_id, view in views.items():
            args += [peer_id, view]
        for spans in busy_spans.values():
            args += [len(spans), *spans]
        script_keys = [keys.peers, *(keys.spans(peer_id) for peer_id in busy_spans)]
        # Repeated after a lost answer it may store a span twice, which is harmless for hints.
        await self._redis.write(partial(self._put_peers.run, keys=script_keys, args=args))

    async def peers(self, run_id: str) -> dict[str, bytes]:
        """See `Store.peers`."""
        found: dict[Any, Any] = await self._redis.read(lambda redis: redis.hgetall(RunKeys(run_id).peers))
        return {peer_id.decode(): view for peer_id, view in found.items()}

    async def forget_peers(self, run_id: str, peer_ids: Sequence[str]) -> None:
        """See `Store.forget_peers`."""
        if not peer_ids:
            return
        keys = RunKeys(run_id)
        commands = [("HDEL", keys.peers, *peer_ids), *(("UNLINK", keys.spans(peer_id)) for peer_id in peer_ids)]
        await self._redis.write(partial(pipelined, commands=commands))

    async def busy_spans(self, run_id: str, peer_id: str) -> list[bytes]:
        """See `Store.busy_spans`."""
        key = RunKeys(run_id).spans(peer_id)
        found: list[Any] = await self._redis.read(lambda redis: redis.lrange(key, 0, -1))
        return found

    async def run_ids(self) -> list[str]:
        """See `Store.run_ids`."""
        found: list[Any] = await self._redis.read(lambda redis: redis.zrange(RUNS, 0, -1))
        return [run_id.decode() for run_id in found]

    async def roots(self, run_ids: Sequence[str]) -> list[Root | None]:
        """See `Store.roots`."""
        if not run_ids:
            return []
        keys = [RunKeys(run_id) for run_id in run_ids]
        roots = [("HMGET", each.run, "revision", "name", "record") for each in keys]
        sizes = [("HLEN", each.groups) for each in keys]
        found = await self._redis.read(partial(pipelined, commands=[*roots, *sizes]))
        return [
            Root(mark=Mark(int(revision), name.decode()), run=record, num_records=num_records) if revision else None
            for (revision, name, record), num_records in zip(found[: len(keys)], found[len(keys) :], strict=True)
        ]

    async def answer_roll(self, broker: Broker, process: str, *, is_leaving: bool = False) -> Roll:
        """See `Store.answer_roll`."""
        return await self._roll.answer(broker, process, is_leaving=is_leaving)

    async def note_shards(self, run_id: str, num_shards: int) -> None:
        """See `Store.note_shards`."""
        await self._roll.note_shards(run_id, num_shards)

    async def now_s(self, run_id: str) -> float:
        """See `Store.now_s`."""
        seconds, microseconds = await self._redis.read(
            lambda redis: self._now.run(redis, keys=[RunKeys(run_id).run], args=[])
        )
        return int(seconds) + int(microseconds) / 1e6

    def purge(self, run_id: str, expected: Mark) -> AsyncIterator[int]:
        """See `Store.purge`."""
        return self._purge.purge(run_id, expected)

    async def delete(self, run_id: str, expected: Mark | None) -> None:
        """See `Store.delete`."""
        await self._purge.delete(run_id, expected)

    async def ping(self) -> None:
        """See `Store.ping`. Writes: a replica, or a server without memory or disk, answers a ping as well."""
        probe = ("SET", PROBE, b"", "PX", PROBE_TTL_MS)
        await self._redis.write(lambda redis: exchange(redis, [probe], num_replicas=self._num_wait_replicas))

    async def close(self) -> None:
        """See `Store.close`."""
        await self._redis.close()
