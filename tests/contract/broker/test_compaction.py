"""What a run keeps, on every store: delivered samples in compact form, and no more than its policy allows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.clients.trajectories import TrajectorySession
from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import merge_versions
from services.broker.assembly import large_groups
from services.broker.operations.compaction import CompactSample, replace_chunks
from services.broker.records.store import PayloadSlice, Store
from services.broker.records.stored_sample import read_sample
from services.broker.runtime.run_replica import RunReplica
from services.broker.state.run_state import FORMAT, RunState
from tests.helpers.brokers.broker import RUN, Generator, RunningBroker, Trainer, Worker, chunk, prompt, serving
from tests.helpers.brokers.trajectories import group

SAMPLES = [("a", 0), ("a", 1)]
STOP = types_pb2.FINISH_REASON_STOP


@pytest.fixture
async def broker(store: Store) -> AsyncIterator[RunningBroker]:
    async with serving(store) as running:
        await running.open(groups_per_step=1, max_staleness=4)
        yield running


def _replica(broker: RunningBroker) -> RunReplica:
    return broker.run_registry.replica(RUN)


async def _ready(broker: RunningBroker, name: str = "a", *, version: int = 0) -> None:
    """A scored group of two samples, each in four chunks, some tokens given by a tool."""
    await broker.submit(prompt(name))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    generator.beat(credits=2, version=version)
    for number, lease in enumerate(await generator.leases(2)):
        chunks = [chunk(lease, [number, 70_000 + at], version=version, offset=2 * at) for at in range(3)]
        chunks[1].loss_mask = b"\0\1"
        chunks.append(chunk(lease, [9], version=version, offset=6, finish=STOP, text=f"sample {number}"))
        assert await generator.put(*chunks) == []
    await worker.score(2)


def _told(groups: list[types_pb2.TrajectoryGroup]) -> list[types_pb2.TrajectoryGroup]:
    """Groups as a client decodes them: with neighbouring runs of one version joined, and without the text."""
    found: list[types_pb2.TrajectoryGroup] = []
    for each in groups:
        copy = types_pb2.TrajectoryGroup.FromString(each.SerializeToString())
        for trajectory in copy.trajectories:
            trajectory.policy_versions.CopyFrom(merge_versions(trajectory.policy_versions))
            trajectory.text = ""
        found.append(copy)
    return found


async def _delivered(broker: RunningBroker) -> list[types_pb2.TrajectoryGroup]:
    """What a new stream of the trainer gets, once the store has it in compact form."""
    groups = await Trainer.connect(broker.channel).groups(1)
    await _replica(broker).compactor.settled()
    return groups


async def _exported(broker: RunningBroker) -> list[types_pb2.TrajectoryGroup]:
    request = broker_pb2.ExportTrajectoriesRequest(run_id=RUN, accepts_group_pieces=True)
    groups: list[types_pb2.TrajectoryGroup] = []
    pieces = b""
    call: Any = broker.stub.ExportTrajectories(request, timeout=30)
    async for response in call:
        if response.HasField("group"):
            groups.append(response.group)
        elif response.HasField("piece"):
            pieces += response.piece.data
            if response.piece.is_last:
                groups.append(types_pb2.TrajectoryGroup.FromString(pieces))
                pieces = b""
    await _replica(broker).compactor.settled()
    return groups


async def test_a_delivered_sample_is_one_compact_element(broker: RunningBroker, store: Store) -> None:
    await _ready(broker)
    before = await store.chunks(RUN, SAMPLES)
    assert [len(parts) for parts in before] == [4, 4]
    first = await _delivered(broker)
    after = await store.chunks(RUN, SAMPLES)
    assert [len(parts) for parts in after] == [1, 1]
    assert sum(map(len, after[0])) < sum(map(len, before[0]))
    assert [read_sample(parts).text for parts in after] == ["sample 0", "sample 1"]
    state = await _replica(broker).transact(lambda state: state)
    assert state.run.format == FORMAT
    # Handed back to a new stream, it is read in its new form.
    assert _told(await _delivered(broker)) == _told(first)


async def test_an_export_and_a_rewind_read_the_compact_form(broker: RunningBroker) -> None:
    await _ready(broker)
    trainer = Trainer.connect(broker.channel)
    first = await trainer.groups(1)
    await _replica(broker).compactor.settled()
    await trainer.ack(["a"], 1)
    (exported,) = await _exported(broker)
    assert [trajectory.text for trajectory in exported.trajectories] == ["sample 0", "sample 1"]
    assert _told([exported]) == _told(first)
    assert (await broker.open(version=0, groups_per_step=1, max_staleness=4)).num_groups_rewound == 1
    assert _told(await _delivered(broker)) == _told(first)
    await broker.audit()


async def _refuse(*_arguments: object) -> None:
    """In place of `Compactor.offer`: as in a run of an older Penstock."""


@pytest.mark.parametrize("is_large", [False, True])
async def test_a_run_from_before_is_compacted_when_it_is_exported(
    broker: RunningBroker, store: Store, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    await _ready(broker)
    with monkeypatch.context() as older:
        older.setattr(_replica(broker).compactor, "offer", _refuse)
        trainer = Trainer.connect(broker.channel)
        first = await trainer.groups(1)
        await trainer.ack(["a"], 1)
    assert [len(parts) for parts in await store.chunks(RUN, SAMPLES)] == [4, 4]
    if is_large:
        # Sent in pieces, each sample read by itself.
        monkeypatch.setattr(large_groups, "MAX_WHOLE_BYTES", 1)
        monkeypatch.setattr(large_groups, "READ_BYTES", 1)
    assert _told(await _exported(broker)) == _told(first)
    assert [len(parts) for parts in await store.chunks(RUN, SAMPLES)] == [1, 1]
    assert _told(await _exported(broker)) == _told(first)


async def test_what_cannot_be_stored_keeps_its_chunks(
    broker: RunningBroker, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _ready(broker)
    replica = _replica(broker)
    offer = replica.compactor.offer

    async def unavailable(_operation: object) -> int:
        raise ServiceUnavailableError("no store")

    with monkeypatch.context() as failing:
        failing.setattr(replica.compactor, "offer", lambda group, stored, _transact: offer(group, stored, unavailable))
        first = await _delivered(broker)
    assert [len(parts) for parts in await store.chunks(RUN, SAMPLES)] == [4, 4]
    assert _told(await _delivered(broker)) == _told(first)
    assert [len(parts) for parts in await store.chunks(RUN, SAMPLES)] == [1, 1]


async def test_a_sample_that_changed_since_it_was_read_is_left_alone(broker: RunningBroker, store: Store) -> None:
    """Wrong attempt, dropped group, and a sample that is still decoded."""
    await _ready(broker)
    await broker.submit(prompt("b"))
    before = await store.chunks(RUN, [*SAMPLES, ("b", 0)])

    def replace(state: RunState) -> int:
        wanted = [(("a", 0), 1), (("gone", 0), 0), (("b", 0), 0), (("a", 7), 0)]
        return replace_chunks(
            state, [CompactSample(sample=sample, attempt=attempt, payload=b"\0") for sample, attempt in wanted]
        )

    assert await _replica(broker).transact(replace) == 0
    assert await store.chunks(RUN, [*SAMPLES, ("b", 0)]) == before


async def test_what_a_run_keeps_stays_below_its_bound(store: Store) -> None:
    """Steps of two groups of 128 kB each under a bound of 1 MiB, half of which holds two steps."""
    policy = broker_pb2.RunPolicy(max_retained_bytes=1024**2)
    async with serving(store) as broker:
        await broker.open(groups_per_step=2, max_completion_tokens=8192, policy=policy)
        replica, trainer = _replica(broker), Trainer.connect(broker.channel)
        payload_ids: list[str] = []
        async with TrajectorySession(broker.connection, run_id=RUN, producer_id="p") as session:
            for version in range(8):
                made = [group(f"g{version}-{number}", version=version, num_tokens=8000) for number in range(2)]
                await session.send(made)
                await session.flush()
                state = await replica.transact(lambda state: state)
                payload_ids += sorted({record.put.payload_id for record in state.groups.values()} - set(payload_ids))
                assert state.index.live_bytes + state.index.retained_bytes.total() <= policy.max_retained_bytes
                names = [each.prompt.group_id for each in await trainer.groups(2)]
                await trainer.ack(names, version + 1)
        state = await replica.transact(lambda state: state)
        assert sorted(state.index.trained) == [7, 8]
        used = {record.put.payload_id for record in state.groups.values()}
        slices = [PayloadSlice(payload_id=payload_id, start=0, end=1 << 20) for payload_id in payload_ids]
        found = await store.payloads(RUN, slices)
        assert [bool(data) for data in found] == [payload_id in used for payload_id in payload_ids]
        assert sum(map(len, found)) <= policy.max_retained_bytes // 2
        await broker.audit()
