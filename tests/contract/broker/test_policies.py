"""What a run's policy changes on the wire: stale samples, partial groups, filtering, oversampling and their books."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from penstock.errors import InvalidFieldError, RunConflictError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.runtime import run_registry
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    eventually,
    prompt,
    result,
    serving,
)
from tests.helpers.brokers.steps import train_step


@pytest.fixture
async def broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        yield running


async def test_another_policy_is_a_conflict_and_the_runs_own_is_shown(broker: RunningBroker) -> None:
    await broker.open(policy=broker_pb2.RunPolicy(stale=broker_pb2.STALE_POLICY_DROP))
    with pytest.raises(RunConflictError, match=r"policy\.stale"):
        await broker.open()
    with pytest.raises(InvalidFieldError, match=r"policy\.dispatch: 'best'; must be one of fifo"):
        await broker.open(run_id="other", policy=broker_pb2.RunPolicy(dispatch="best"))
    shown = (await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))).policy
    assert shown == broker_pb2.RunPolicy(
        stale=broker_pb2.STALE_POLICY_DROP,
        partial_groups=broker_pb2.PARTIAL_GROUP_POLICY_SHRINK,
        num_retained_steps=64,
        max_retained_bytes=4 * 1024**3,
        token_shards=1,
        dispatch="auto",
    )


async def test_what_became_too_stale_is_revoked_and_leased_again_as_the_next_attempt(broker: RunningBroker) -> None:
    await broker.open(policy=broker_pb2.RunPolicy(stale=broker_pb2.STALE_POLICY_DROP))
    slow, quick = Generator.connect(broker.channel, "slow"), Generator.connect(broker.channel, "quick")
    worker, trainer = Worker.connect(broker.channel), Trainer.connect(broker.channel)
    await broker.submit(prompt("slow"))
    slow.beat(credits=2)
    lost = await slow.leases(2)
    assert [lease.key.attempt for lease in lost] == [0, 0]
    assert await slow.put(chunk(lost[0], [1, 2])) == []
    await broker.submit(prompt("quick"))
    quick.beat(credits=2)
    await quick.finish(await quick.leases(2))
    await worker.score(2)
    assert [group.prompt.group_id for group in await trainer.groups(1)] == ["quick"]
    await trainer.ack(["quick"], 1)
    revoked = {
        await slow.stream.expect(lambda response: response.revocation.lease_id or None) for _ in range(len(lost))
    }
    assert revoked == {lease.lease_id for lease in lost}
    [error] = await slow.put(chunk(lost[0], [3], offset=2))
    assert (error.reason, error.key) == ("LEASE_LOST", lost[0].key)
    quick.beat(credits=2, version=1)
    again = await quick.leases(2)
    assert [(lease.key.group_id, lease.key.attempt, lease.prefix_token_ids) for lease in again] == [
        ("slow", 1, b"")
    ] * 2
    await quick.finish(again)
    scoring = await worker.leases(2)
    assert {lease.item.key.attempt for lease in scoring} == {1}
    await worker.report(*map(result, scoring))
    [group] = await trainer.groups(1)
    assert [(item.key.attempt, item.min_policy_version) for item in group.trajectories] == [(1, 1)] * 2
    await trainer.ack(["slow"], 2)
    books = await broker.audit()
    assert (books.submitted, books.trained, dict(books.dropped)) == (6, 4, {"stale": 2})


async def test_the_audit_shows_what_was_dropped_by_version_and_length(broker: RunningBroker) -> None:
    await broker.open()
    await train_step(broker, "a", "b")
    await broker.submit(prompt("c"))
    await broker.call("DropGroups", broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["c"], reason="poisoned"))
    await broker.submit(prompt("d"))
    books = await broker.audit()
    assert [(row.submit_version, row.max_tokens, row.trained, row.in_flight) for row in books.rows] == [
        (0, 4, 4, 0),
        (1, 0, 0, 2),
    ]
    assert [dict(row.dropped) for row in books.rows] == [{}, {"poisoned": 2}]
    assert [(row.submit_version, row.submitted) for row in books.submitted_by_version] == [(0, 4), (1, 4)]
    await broker.open(version=0)
    rewound = await broker.audit()
    assert [(row.submit_version, row.max_tokens, row.trained, row.in_flight) for row in rewound.rows] == [
        (0, 4, 0, 4),
        (1, 0, 0, 2),
    ]


async def test_a_lost_sample_that_is_waited_for_is_leased_as_its_next_attempt(broker: RunningBroker) -> None:
    await broker.open(policy=broker_pb2.RunPolicy(partial_groups=broker_pb2.PARTIAL_GROUP_POLICY_WAIT))
    await broker.submit(prompt("a"))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    generator.beat(credits=2)
    await generator.finish(await generator.leases(2))
    first, second = await worker.leases(2)
    await worker.report(result(first, None, types_pb2.SCORE_STATUS_FAILED), result(second))
    generator.beat(credits=1)
    [again] = await generator.leases(1)
    assert (again.key.sample_index, again.key.attempt) == (first.item.key.sample_index, 1)
    await generator.finish([again])
    await worker.score(1)
    trainer = Trainer.connect(broker.channel)
    [group] = await trainer.groups(1)
    assert sorted(item.key.attempt for item in group.trajectories) == [0, 1]
    books = await broker.audit()
    assert (books.submitted, dict(books.dropped), books.in_flight) == (3, {"reward_failed": 1}, 2)


async def test_extra_samples_are_revoked_once_the_group_is_full(broker: RunningBroker) -> None:
    await broker.open(policy=broker_pb2.RunPolicy(num_extra_samples=1))
    await broker.submit(prompt("a"))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    generator.beat(credits=9)
    slow, *quick = await generator.leases(3)
    await generator.finish(quick)
    await worker.score(2)
    assert await generator.stream.expect(lambda response: response.revocation.lease_id or None) == slow.lease_id
    trainer = Trainer.connect(broker.channel)
    [group] = await trainer.groups(1)
    assert [item.key.sample_index for item in group.trajectories] == [lease.key.sample_index for lease in quick]
    await trainer.ack(["a"], 1)
    books = await broker.audit()
    assert (books.submitted, books.trained, dict(books.dropped)) == (3, 2, {"oversampled": 1})


async def test_groups_without_variance_never_reach_the_trainer(broker: RunningBroker) -> None:
    await broker.open(policy=broker_pb2.RunPolicy(drops_zero_variance=True))
    await broker.submit(prompt("same"), prompt("mixed"))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    generator.beat(credits=4)
    await generator.finish(await generator.leases(4))
    leases = await worker.leases(4)
    values = {("mixed", 0): 0.0}
    await worker.report(
        *(result(lease, values.get((lease.item.key.group_id, lease.item.key.sample_index), 1.0)) for lease in leases)
    )
    trainer = Trainer.connect(broker.channel)
    assert [group.prompt.group_id for group in await trainer.groups(1)] == ["mixed"]
    assert dict((await broker.audit()).dropped) == {"zero_variance": 2}


async def test_the_gauges_by_length_follow_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_registry, "BOOKS_EVERY_S", 0.0)
    registry = CollectorRegistry()

    async def counts() -> bool:
        names = ("penstock_broker_samples_trained_by_length", "penstock_broker_samples_dropped")
        labels = ({"run": RUN, "max_tokens": "4"}, {"run": RUN, "max_tokens": "0", "reason": "poisoned"})
        found = [registry.get_sample_value(name, label) for name, label in zip(names, labels, strict=True)]
        return found == [4, 2]

    async with serving(MemoryStore(), registry=registry) as broker:
        await broker.open()
        await train_step(broker, "a", "b")
        await broker.submit(prompt("c"))
        await broker.call("DropGroups", broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["c"], reason="poisoned"))
        await eventually(counts)
