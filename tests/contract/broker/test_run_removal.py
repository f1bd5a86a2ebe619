"""Runs that are listed, deleted, or expire after their closing, on every store."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from penstock.clients.trajectories import TrajectorySession
from penstock.clock import ManualClock, SystemClock
from penstock.errors import NotRetainedError, RunConflictError, UnknownRunError, from_rpc_error
from penstock.v1 import broker_pb2
from services.broker.records.store import Delta, Store
from services.broker.records_pb2 import GroupRecord, RunRecord
from services.broker.runtime import removal
from services.broker.runtime.retention import Retention
from services.broker.runtime.run_replica import RunReplica
from services.broker.server import make_run_registry
from services.broker.state.other_records import is_group
from services.broker.storage.memory_store import MemoryStore
from services.broker.storage.redis import delete_run
from services.broker.storage.redis.keys import RUNS
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.brokers.agent_sessions import put_session
from tests.helpers.brokers.broker import RUN, Generator, RunningBroker, prompt, serving
from tests.helpers.brokers.format_1 import as_format_1
from tests.helpers.brokers.steps import train_step
from tests.helpers.brokers.trajectories import groups


async def keys_of(store: Store, run_id: str = RUN) -> set[str]:
    """Everything that a store holds of a run; of the one in memory, whether it holds any."""
    if isinstance(store, MemoryStore):
        return {run_id} & store._runs.keys()
    assert isinstance(store, RedisStore)
    redis: Any = store._redis._redis
    found = {key.decode() async for key in redis.scan_iter(match=f"penstock:{{{run_id}}}:*", count=1000)}
    return found | ({RUNS} if await redis.zscore(RUNS, run_id) is not None else set())


async def delete(broker: RunningBroker, *, force: bool = False) -> broker_pb2.DeleteRunResponse:
    """Repeat the call until nothing is left."""
    num_keys, existed = 0, False
    while True:
        response = await broker.call("DeleteRun", broker_pb2.DeleteRunRequest(run_id=RUN, force=force))
        num_keys, existed = num_keys + response.num_keys, existed or response.existed
        if response.is_complete:
            return broker_pb2.DeleteRunResponse(existed=existed, num_keys=num_keys, is_complete=True)


async def put_to_work(broker: RunningBroker) -> Generator:
    """A run in which this generator has two leases."""
    await broker.open()
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=2)
    await generator.leases(2)
    return generator


async def close(broker: RunningBroker, reason: str = "") -> None:
    await broker.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN, drop_reason=reason))


async def fill(broker: RunningBroker) -> None:
    """A run with everything that a run can have: trained, waiting, put, retired, a peer, a tally, a session."""
    policy = broker_pb2.RunPolicy(num_retained_steps=1)
    await broker.open(policy=policy, max_staleness=4)
    await train_step(broker, "a", "b")
    await train_step(broker, "c", "d", version=1, weights=0)
    await broker.submit(prompt("e"), prompt("f"))
    async with TrajectorySession(broker.connection, run_id=RUN, producer_id="p") as producer:
        await producer.store(groups("x", "y"))
    await put_session(broker, "s", owner="gen-9")


async def export(broker: RunningBroker, **request: Any) -> list[Any]:
    call = broker.stub.ExportTrajectories(broker_pb2.ExportTrajectoriesRequest(run_id=RUN, **request), timeout=20)
    found = []
    try:
        while (response := await call.read()) is not grpc.aio.EOF:
            found.append(response)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer="broker") from error
    return found


async def listed(broker: RunningBroker) -> list[broker_pb2.RunSummary]:
    response = await broker.call("ListRuns", broker_pb2.ListRunsRequest())
    assert list(response.run_ids) == [run.run_id for run in response.runs]
    return list(response.runs)


async def test_a_deleted_run_leaves_no_key_and_its_id_is_free(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete_run, "SLICE_KEYS", 3)
    monkeypatch.setattr(delete_run, "SLICE_RECORDS", 2)
    async with serving(store) as broker:
        await fill(broker)
        await broker.open(run_id="other")
        await close(broker)
        assert await keys_of(store)
        deleted = await delete(broker)
        assert deleted.existed
        assert deleted.num_keys > 0
        assert await keys_of(store) == set()
        assert [run.run_id for run in await listed(broker)] == ["other"]
        assert await delete(broker) == broker_pb2.DeleteRunResponse(is_complete=True)
        with pytest.raises(UnknownRunError):
            await broker.audit()
        assert not (await broker.open()).existed
        await train_step(broker, "a", "b")
        assert (await broker.audit()).trained == 4


async def test_a_run_of_format_1_is_deleted_with_its_payload(store: Store) -> None:
    async with serving(store) as broker:
        await fill(broker)
        await close(broker)
    snapshot = await store.load(RUN, None)
    assert snapshot is not None
    run = RunRecord.FromString(snapshot.run)
    run.format = 1
    changed: dict[str, bytes | None] = {}
    for name, data in snapshot.groups.items():
        assert data is not None
        if is_group(name) and (record := GroupRecord.FromString(data)).HasField("put"):
            changed |= {name: None} | dict([as_format_1(record)])
    assert changed
    await store.commit(RUN, snapshot.mark, Delta(run=run.SerializeToString(), groups=changed))
    async with serving(store) as broker:
        assert (await delete(broker)).existed
        assert await keys_of(store) == set()


async def test_a_deletion_in_many_calls_keeps_everybody_out_until_it_is_done(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delete_run, "SLICE_KEYS", 1)
    monkeypatch.setattr(removal, "CALL_S", -1.0)
    async with serving(store) as broker:
        await fill(broker)
        await close(broker)
        first = await broker.call("DeleteRun", broker_pb2.DeleteRunRequest(run_id=RUN))
        assert (first.existed, first.is_complete) == (True, False)
        assert [(run.is_closed, run.payload_gone) for run in await listed(broker)] == [(True, "deleted")]
        with pytest.raises(RunConflictError, match=r"is being deleted.*penstock runs delete run-1"):
            await broker.open(policy=broker_pb2.RunPolicy(num_retained_steps=1), max_staleness=4)
        with pytest.raises(NotRetainedError, match="its payload is gone"):
            await export(broker)
        monkeypatch.setattr(removal, "CALL_S", 2.0)
        # Whoever began it is gone; a broker finishes it.
        await Retention(broker.run_registry, keep_s=None).check()
        assert await keys_of(store) == set()


async def test_an_open_run_at_work_is_deleted_by_force_only(store: Store) -> None:
    async with serving(store) as broker:
        _at_work = await put_to_work(broker)
        with pytest.raises(RunConflictError, match=r"being worked on \(generator gen-1\).*--force"):
            await delete(broker)
        assert (await broker.audit()).in_flight == 2
        assert (await delete(broker, force=True)).existed
        assert await keys_of(store) - {f"penstock:{{{RUN}}}:peers", f"penstock:{{{RUN}}}:spans:g:gen-1"} == set()


async def test_a_broker_whose_own_clock_is_ahead_takes_no_run_at_work_for_idle(store: Store) -> None:
    async with serving(store) as broker:
        _at_work = await put_to_work(broker)
        other = RunReplica(RUN, store=store, clock=ManualClock(time.time() + 7200.0))
        with pytest.raises(RunConflictError, match=r"being worked on \(generator gen-1\)"):
            await removal.delete(other, is_forced=False)
        assert (await broker.audit()).in_flight == 2


async def test_an_open_run_that_was_left_alone_needs_no_force(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(store) as broker:
        await broker.open()
        await broker.submit(prompt("a"))
        with pytest.raises(RunConflictError, match="was opened or took a step"):
            await delete(broker)
        monkeypatch.setattr(removal, "WORKING_S", 0.0)
        assert (await delete(broker)).existed
        assert await keys_of(store) == set()


async def test_the_payload_of_a_closed_run_expires_and_its_audit_stays(store: Store) -> None:
    async with serving(store) as broker:
        await fill(broker)
        before = await broker.audit()
        await close(broker)
        await Retention(broker.run_registry, keep_s=3600.0).check()
        await Retention(broker.run_registry, keep_s=None).check()
        assert await export(broker)
        await Retention(broker.run_registry, keep_s=0.0).check()
        books = await broker.audit()
        assert (books.trained, books.submitted, books.in_flight) == (before.trained, before.submitted, 0)
        assert dict(books.dropped) == {"expired": before.in_flight}
        with pytest.raises(NotRetainedError, match=r"payload is gone \(expired\)"):
            await export(broker)
        with pytest.raises(NotRetainedError):
            await export(broker, from_policy_version=2)
        assert await export(broker, from_policy_version=3) == []
        with pytest.raises(RunConflictError, match=r"has expired: it cannot be resumed.*runs delete run-1"):
            await broker.open(policy=broker_pb2.RunPolicy(num_retained_steps=1), max_staleness=4, version=2)
        [run] = await listed(broker)
        assert (run.is_closed, run.payload_gone, run.num_records, run.trained) == (True, "expired", 0, before.trained)
        if isinstance(store, RedisStore):
            left = {key.rpartition("}:")[2].partition(":")[0] for key in await keys_of(store)}
            assert left <= {"run", "marks", "changed", "books", "peers", "spans", "penstock"}
        assert (await delete(broker)).existed
        assert await keys_of(store) == set()


@pytest.mark.parametrize(("keep_s", "every_s"), [(None, 600.0), (86_400.0, 600.0), (60.0, 60.0), (0.0, 10.0)])
def test_runs_kept_for_a_short_time_are_looked_at_as_often(keep_s: float | None, every_s: float) -> None:
    registry = make_run_registry(MemoryStore(), registry=CollectorRegistry(), clock=SystemClock())
    assert Retention(registry, keep_s=keep_s).check_every_s == every_s


async def test_a_run_that_is_opened_again_does_not_expire(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open()
        await train_step(broker, "a", "b")
        await close(broker)
        await broker.open(version=1)
        await Retention(broker.run_registry, keep_s=0.0).check()
        assert len(await export(broker)) == 2


async def test_the_newest_runs_are_listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(store) as broker:
        await broker.open(run_id="first")
        await broker.open()
        await train_step(broker, "a", "b")
        first, second = await listed(broker)
        assert (first.run_id, first.is_closed, first.num_records) == ("first", False, 0)
        assert (second.run_id, second.policy_version, second.num_records, second.submitted) == (RUN, 1, 2, 4)
        assert second.active_time.ToMicroseconds() >= second.open_time.ToMicroseconds() > 0
