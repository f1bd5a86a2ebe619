"""Every store that the broker can run on, for suites that hold for all of them.

Use the fixture `store` of tests/conftest.py, which runs a test once for each of STORES on an empty store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from services.broker.records.store import Store
from services.broker.storage.memory_store import MemoryStore
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.stores.redis_groups import ClusterGroup, SentinelGroup
from tests.helpers.stores.redis_server import flush, shared_redis

GROUPED_STORES = ("sentinel", "cluster")
"""Of several processes each, which take their time."""
STORES = ("memory", "redis", *GROUPED_STORES)


class RedisServers:
    """Real servers of each kind, started when first asked for, shared by the tests of a session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._single: Iterator[str] | None = None
        self._single_url = ""
        self._groups: dict[str, SentinelGroup | ClusterGroup] = {}

    def emptied(self, kind: str) -> str:
        """The URL of an empty server of a kind."""
        if kind == "redis":
            if self._single is None:
                self._single = shared_redis(self._folder)
                self._single_url = next(self._single)
            flush(self._single_url)
            return self._single_url
        group = self._groups.get(kind)
        if group is None:
            folder = self._folder / kind
            group = self._groups[kind] = SentinelGroup(folder) if kind == "sentinel" else ClusterGroup(folder)
            group.start()
        group.flush()
        return group.url

    def stop(self) -> None:
        """Stop all."""
        for group in self._groups.values():
            group.stop()
        if self._single is not None:
            next(self._single, None)


@contextmanager
def redis_servers(folder: Path) -> Iterator[RedisServers]:
    """Servers for the length of a session."""
    servers = RedisServers(folder)
    try:
        yield servers
    finally:
        servers.stop()


@asynccontextmanager
async def opened_store(kind: str, servers: RedisServers) -> AsyncIterator[Store]:
    """An empty store of a kind."""
    if kind == "memory":
        yield MemoryStore()
        return
    redis_store = RedisStore.from_url(servers.emptied(kind))
    try:
        yield redis_store
    finally:
        await redis_store.close()
