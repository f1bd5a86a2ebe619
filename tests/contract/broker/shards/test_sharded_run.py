"""A run whose tokens are in shards, through the service: nobody but the generator sees a difference."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_array
from services.broker.operations import leasing
from services.broker.records.shard_ids import MAX_TOKEN_SHARDS, shard_id
from services.broker.records.store import SampleId, Store
from services.broker.shards import shard_replica
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    eventually,
    prompt,
    serving,
)
from tests.helpers.brokers.steps import train_step

pytestmark = pytest.mark.slow

SAMPLES = [(name, index) for name in ("a", "b") for index in (0, 1)]
ABORTED, STOP = types_pb2.FINISH_REASON_ABORTED, types_pb2.FINISH_REASON_STOP


async def opened(broker: RunningBroker, **changes: Any) -> None:
    await broker.open(policy=broker_pb2.RunPolicy(token_shards=3), **changes)


async def stored(store: Store, samples: list[SampleId] = SAMPLES) -> list[list[int]]:
    """The number of elements of each sample's list, in the run and each of its shards."""
    documents = [shard_id(RUN, shard) for shard in (0, 1, 2, 3)]
    found = [await store.chunks(document, samples) for document in documents]
    return [[len(found[document][at]) for document in range(4)] for at in range(len(samples))]


def tokens_of(group: types_pb2.TrajectoryGroup) -> list[list[int]]:
    return [int32_array(each.token_ids, "token_ids").tolist() for each in group.trajectories]


async def test_a_step_is_scored_trained_exported_and_kept_compact_from_its_shards(store: Store) -> None:
    async with serving(store) as broker:
        await opened(broker)
        await broker.submit(prompt("a"), prompt("b"))
        generator = Generator.connect(broker.channel)
        worker, trainer = Worker.connect(broker.channel), Trainer.connect(broker.channel)
        generator.beat(credits=4, version=0)
        leases = await generator.leases(4)
        [shard] = {lease.token_shard for lease in leases}
        for number, lease in enumerate(leases):
            assert await generator.put(chunk(lease, [number, 7]), chunk(lease, [8], offset=2, finish=STOP)) == []
        assert await stored(store) == [[2 if at == shard else 0 for at in range(4)]] * 4
        scored = await worker.leases(4)
        assert sorted(int32_array(lease.item.token_ids, "")[0] for lease in scored) == [0, 1, 2, 3]
        await worker.report(
            *(
                broker_pb2.ScoreResult(
                    lease_id=lease.lease_id,
                    key=lease.item.key,
                    score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0),
                )
                for lease in scored
            )
        )
        groups = await trainer.groups(2)
        assert sorted(tokens for group in groups for tokens in tokens_of(group)) == [[n, 7, 8] for n in range(4)]
        await trainer.ack([group.prompt.group_id for group in groups], 1)
        await broker.run_registry.replica(RUN).compactor.settled()
        assert await stored(store) == [[int(at == shard) for at in range(4)]] * 4
        request = broker_pb2.ExportTrajectoriesRequest(run_id=RUN)
        exported = [
            each.group
            async for each in broker.stub.ExportTrajectories(request, timeout=30)
            if each.group.prompt.group_id
        ]
        assert sorted(tokens for group in exported for tokens in tokens_of(group)) == [[n, 7, 8] for n in range(4)]
        assert (await broker.audit()).trained == 4


async def test_what_a_generator_left_is_continued_by_another_and_nothing_is_left_of_dropped_groups(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_replica, "CLEAN_EVERY_S", 0.0)
    async with serving(store) as broker:
        await opened(broker)
        await broker.submit(prompt("a"), prompt("b"))
        first, second = (Generator.connect(broker.channel, generator_id=f"gen-{number}") for number in (1, 2))
        first.beat(credits=4, version=0)
        leases = await first.leases(4)
        assert await first.put(*(chunk(lease, [5, 6]) for lease in leases)) == []
        assert await first.put(*(chunk(lease, [], offset=2, finish=ABORTED) for lease in leases)) == []
        second.beat(credits=4, version=0)
        again = await second.leases(4)
        assert [int32_array(lease.prefix_token_ids, "").tolist() for lease in again] == [[5, 6]] * 4
        assert {lease.token_shard for lease in again} == {lease.token_shard for lease in leases}
        errors = await first.put(*(chunk(lease, [9], offset=2) for lease in leases))
        assert [error.reason for error in errors] == ["LEASE_LOST"] * 4
        assert await second.put(*(chunk(lease, [7], offset=2, finish=STOP) for lease in again)) == []
        await broker.call(
            "DropGroups", broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["a", "b"], reason="unwanted")
        )

        async def is_clean() -> bool:
            return await stored(store) == [[0] * 4] * 4

        await eventually(is_clean)
        assert (await broker.audit()).dropped["unwanted"] == 4


async def test_a_lease_that_expires_is_sealed_and_continued(store: Store) -> None:
    async with serving(store) as broker:
        await opened(broker, group_size=1, groups_per_step=1)
        await broker.submit(prompt("a", group_size=1))
        first, second = (Generator.connect(broker.channel, generator_id=f"gen-{number}") for number in (1, 2))
        first.beat(credits=1, version=0)
        [lease] = await first.leases(1)
        assert await first.put(chunk(lease, [5, 6])) == []
        replica = broker.run_registry.replica(RUN)

        def end(state: Any) -> None:
            leasing.expire(state, 1e12)

        await replica.transact(end)
        second.beat(credits=1, version=0)
        [again] = await second.leases(1)
        assert int32_array(again.prefix_token_ids, "").tolist() == [5, 6]
        assert [error.reason for error in await first.put(chunk(lease, [9], offset=2))] == ["LEASE_LOST"]


async def test_chunks_of_no_shard_or_another_are_refused_by_name_and_the_others_stored(store: Store) -> None:
    async with serving(store) as broker:
        await opened(broker)
        await broker.submit(prompt("a"), prompt("b"))
        generator = Generator.connect(broker.channel)
        generator.beat(credits=4, version=0)
        leases = await generator.leases(4)
        shard = leases[0].token_shard
        wrong = [0, shard % 3 + 1, MAX_TOKEN_SHARDS + 1]
        errors = await generator.put(
            chunk(leases[0], [1]),
            *(chunk(lease, [1], token_shard=other) for lease, other in zip(leases[1:], wrong, strict=True)),
        )
        assert {error.reason for error in errors} == {"INVALID_FIELD"}
        assert {error.message.partition(";")[0] for error in errors} == {f"token_shard: {other}" for other in wrong}
        assert sorted(sum(counts) for counts in await stored(store)) == [0, 0, 0, 1]
        await generator.put(*(chunk(lease, [1]) for lease in leases[1:]))
        assert sorted(sum(counts) for counts in await stored(store)) == [1, 1, 1, 1]


async def test_a_deleted_run_and_a_whole_step_leave_nothing(store: Store) -> None:
    async with serving(store) as broker:
        await opened(broker)
        await train_step(broker, "a", "b")
        while not (await broker.call("DeleteRun", broker_pb2.DeleteRunRequest(run_id=RUN, force=True))).is_complete:
            pass
        assert await stored(store) == [[0] * 4] * 4
        assert await store.roots([shard_id(RUN, shard) for shard in (1, 2, 3)]) == [None] * 3
