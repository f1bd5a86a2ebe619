"""The store in Redis: one Lua script a commit, one a load. Needs Redis 6.2 or newer.

Durability is Redis' own: with append-only persistence every commit that was answered survives a restart, except what
the fsync policy allows to be lost (a second, by default). A broker notices a history that lost its end by the name of
the commit it last saw, and loads everything anew.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.errors import ServiceUnavailableError
from services.broker.keys import RUNS, RunKeys
from services.broker.store import MARKS_KEPT, MAX_BUSY_SPANS, ConflictError, Delta, Mark, SampleId, Snapshot

SOCKET_TIMEOUT_S = 3.0
MAX_CONNECTIONS = 32

_LUA = Path(__file__).parent / "lua"


class RedisStore:
    """A `Store` in Redis; see `Store` for its promises."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._load = redis.register_script((_LUA / "load.lua").read_text(encoding="ascii"))
        self._commit = redis.register_script((_LUA / "commit.lua").read_text(encoding="ascii"))

    @classmethod
    def from_url(cls, url: str) -> RedisStore:
        """Connects on first use. A command is never silently repeated: the broker decides what a lost answer means."""
        redis: Redis = Redis.from_url(
            url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            max_connections=MAX_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
        )
        return cls(redis)

    async def load(self, run_id: str, since: Mark | None) -> Snapshot | None:
        """See `Store.load`."""
        keys = RunKeys(run_id)
        revision, name = (since.revision, since.name) if since else (0, "")
        async with _available():
            reply: list[Any] | None = await self._load(
                keys=[keys.run, keys.marks, keys.changed, keys.groups], args=[revision, name]
            )
        if not reply:
            return None
        names = [raw.decode() for raw in reply[4::2]]
        return Snapshot(
            mark=Mark(int(reply[0]), reply[1].decode()),
            is_full=bool(reply[3]),
            run=reply[2],
            groups={name: record or None for name, record in zip(names, reply[5::2], strict=True)},
        )

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        """See `Store.commit`."""
        keys = RunKeys(run_id)
        lists = {sample: position for position, sample in enumerate(dict.fromkeys(item[0] for item in delta.chunks), 1)}
        name = secrets.token_hex(8)
        args: list[bytes | str | int] = [
            *((expected.revision, expected.name) if expected else (0, "")),
            *(name, delta.run, MARKS_KEPT),
            *(len(delta.groups), len(delta.prompts), len(delta.retired), len(delta.chunks), len(lists)),
        ]
        for mapping in (delta.groups, delta.prompts):
            for group_id, value in mapping.items():
                args += [group_id, value or b""]
        args += delta.retired
        for sample, chunk in delta.chunks:
            args += [lists[sample], chunk]
        script_keys = [keys.run, keys.marks, keys.changed, keys.groups, keys.prompts, keys.retired]
        script_keys += [keys.chunks(sample) for sample in (*lists, *delta.cleared)]
        async with _available():
            if expected is None:
                await self._redis.zadd(RUNS, {run_id: time.time()}, nx=True)
            revision = await self._commit(keys=script_keys, args=args)
        if revision is None:
            raise ConflictError(run_id)
        return Mark(int(revision), name)

    async def prompts(self, run_id: str, group_ids: Sequence[str]) -> list[bytes | None]:
        """See `Store.prompts`."""
        if not group_ids:
            return []
        async with _available():
            found: list[Any] = await self._redis.hmget(RunKeys(run_id).prompts, list(group_ids))
        return found

    async def chunks(self, run_id: str, samples: Sequence[SampleId]) -> list[list[bytes]]:
        """See `Store.chunks`."""
        if not samples:
            return []
        keys = RunKeys(run_id)
        pipeline = self._redis.pipeline(transaction=False)
        for sample in samples:
            pipeline.lrange(keys.chunks(sample), 0, -1)
        async with _available():
            found: list[list[bytes]] = await pipeline.execute()
        return found

    async def retired(self, run_id: str, group_ids: Sequence[str]) -> set[str]:
        """See `Store.retired`."""
        if not group_ids:
            return set()
        async with _available():
            flags = await self._redis.smismember(RunKeys(run_id).retired, list(group_ids))
        return {group_id for group_id, flag in zip(group_ids, flags, strict=True) if flag}

    async def put_peer(self, run_id: str, peer_id: str, view: bytes, busy_spans: Sequence[bytes]) -> None:
        """See `Store.put_peer`."""
        keys = RunKeys(run_id)
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(keys.peers, peer_id, view)
        if busy_spans:
            pipeline.rpush(keys.spans(peer_id), *busy_spans)
            pipeline.ltrim(keys.spans(peer_id), -MAX_BUSY_SPANS, -1)
        async with _available():
            await pipeline.execute()

    async def peers(self, run_id: str) -> dict[str, bytes]:
        """See `Store.peers`."""
        async with _available():
            found: dict[Any, Any] = await self._redis.hgetall(RunKeys(run_id).peers)
        return {peer_id.decode(): view for peer_id, view in found.items()}

    async def busy_spans(self, run_id: str, peer_id: str) -> list[bytes]:
        """See `Store.busy_spans`."""
        async with _available():
            found: list[Any] = await self._redis.lrange(RunKeys(run_id).spans(peer_id), 0, -1)
        return found

    async def run_ids(self) -> list[str]:
        """See `Store.run_ids`."""
        async with _available():
            found: list[Any] = await self._redis.zrange(RUNS, 0, -1)
        return [run_id.decode() for run_id in found]

    async def ping(self) -> None:
        """See `Store.ping`."""
        async with _available():
            await self._redis.ping()

    async def close(self) -> None:
        """See `Store.close`."""
        await self._redis.aclose()


@asynccontextmanager
async def _available() -> AsyncIterator[None]:
    """Inside, a Redis that is away, still loads its data or became a replica makes ServiceUnavailableError."""
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError, BusyLoadingError, ReadOnlyError, OSError) as error:
        raise ServiceUnavailableError(f"Redis is away: {error or type(error).__name__}") from error
    except RedisError as error:
        raise ServiceUnavailableError(f"Redis refused a command: {error}") from error
