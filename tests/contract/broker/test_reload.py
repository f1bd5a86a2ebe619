"""After a commit whose outcome nobody knows, on every store: what changed since is loaded, not the whole run."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from penstock.clock import SystemClock
from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2
from services.broker.records.store import Delta, Mark, Snapshot, Store
from services.broker.replicas import document_replica as replicas
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.run_state import RunState
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.brokers.broker import limits
from tests.unit.broker.builders import submit

RUN = "run-1"


class _Doubtful:
    """A store that may leave a commit unanswered: `fate` is "stored", "lost", or empty for one that is answered."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.loads: list[Mark | None] = []
        self.fate = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def load(self, run_id: str, since: Mark | None) -> Snapshot | None:
        self.loads.append(since)
        return await self._store.load(run_id, since)

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        if self.fate == "stored":
            await self._store.commit(run_id, expected, delta)
        if self.fate:
            await asyncio.Event().wait()
        return await self._store.commit(run_id, expected, delta)


def _replica(store: object) -> RunReplica:
    return RunReplica(RUN, store=cast("Store", store), clock=SystemClock())


def _records(state: RunState) -> dict[str, bytes]:
    return {name: state.groups.serialized(name) for name in state.groups}


@pytest.mark.parametrize("fate", ["stored", "lost"])
async def test_after_a_commit_that_timed_out_only_the_difference_is_loaded(
    store: Store, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubtful = _Doubtful(store)
    replica = _replica(doubtful)
    await replica.open(broker_pb2.OpenRunRequest(run_id=RUN, limits=limits(max_queued_groups=100)))
    await replica.transact(lambda state: submit(state, "before"))
    doubtful.loads.clear()

    doubtful.fate = fate
    with monkeypatch.context() as scaled:
        scaled.setattr(replicas, "TRANSACTION_TIMEOUT_S", 0.1)
        with pytest.raises(ServiceUnavailableError):
            await replica.transact(lambda state: submit(state, "doubtful"))
    doubtful.fate = ""

    await replica.transact(lambda state: submit(state, "after"))
    assert replica.copy is not None
    assert set(replica.copy.groups) == {"before", "after"} | ({"doubtful"} if fate == "stored" else set())
    assert doubtful.loads
    assert None not in doubtful.loads
    fresh = _replica(store)
    state = await fresh.transact(lambda state: state)
    assert _records(state) == _records(replica.copy)
    assert state.run == replica.copy.run


@pytest.mark.slow
async def test_what_others_stored_meanwhile_is_taken_over_too(store: Store) -> None:
    doubtful, others = _Doubtful(store), _replica(store)
    replica = _replica(doubtful)
    await replica.open(broker_pb2.OpenRunRequest(run_id=RUN, limits=limits(max_queued_groups=100)))
    doubtful.fate, doubtful.loads = "lost", []
    call = asyncio.create_task(replica.transact(lambda state: submit(state, "lost")))
    await others.transact(lambda state: submit(state, "other"))
    async with asyncio.timeout(60):
        with pytest.raises(ServiceUnavailableError):
            await call
    doubtful.fate = ""
    await replica.transact(lambda state: submit(state, "after"))
    assert replica.copy is not None
    assert set(replica.copy.groups) == {"other", "after"}
    assert None not in doubtful.loads


async def test_a_large_run_is_read_from_redis_in_slices(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(store, RedisStore):
        pytest.skip("a store in memory replies with nothing")
    groups: dict[str, bytes | None] = {f"g{number}": b"x" * 1_000 for number in range(5_000)}
    mark = await store.commit(RUN, None, Delta(run=b"1", groups=groups))
    sizes: list[int] = []
    true_read = store._redis.read

    async def read(operation: Any) -> Any:
        reply = await true_read(operation)
        sizes.append(_size(reply))
        return reply

    monkeypatch.setattr(store._redis, "read", read)
    snapshot = await store.load(RUN, None)
    assert snapshot is not None
    assert (snapshot.mark, dict(snapshot.groups)) == (mark, groups)
    assert sum(sizes) > 5_000_000
    assert max(sizes) < 2_000_000


def _size(reply: object) -> int:
    """Bytes of a reply."""
    if isinstance(reply, bytes):
        return len(reply)
    if isinstance(reply, dict):
        return sum(len(key) + len(value) for key, value in reply.items())
    return sum(map(_size, reply)) if isinstance(reply, list | tuple) else 0
