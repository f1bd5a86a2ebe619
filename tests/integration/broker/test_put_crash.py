"""Puts that outlive a broker: killed at any moment between a put and its receipt, everything is stored once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.clients.broker import BrokerClient
from penstock.clients.trajectories import TrajectorySession
from penstock.v1 import broker_pb2
from tests.helpers.brokers.broker import RUN, limits
from tests.helpers.brokers.broker_process import BrokerProcess
from tests.helpers.brokers.trajectories import group, groups
from tests.helpers.stores.redis_server import RedisProcess

NUM_GROUPS, GROUPS_PER_STEP, TIMEOUT_S = 240, 40, 40.0


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path, is_persistent=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def broker(redis_process: RedisProcess) -> Iterator[BrokerProcess]:
    process = BrokerProcess(redis_process.url)
    yield process
    process.kill()


async def test_a_broker_killed_between_put_and_receipt_loses_and_doubles_nothing(broker: BrokerProcess) -> None:
    made = groups(*(f"g{number}" for number in range(NUM_GROUPS)))
    await broker.start()
    async with asyncio.timeout(TIMEOUT_S), BrokerClient(broker.address) as client:
        await client.open_run(RUN, limits=limits(groups_per_step=GROUPS_PER_STEP, max_staleness=9), policy_version=0)
        async with TrajectorySession(client, run_id=RUN, producer_id="p") as producer:
            sending = asyncio.create_task(producer.store(made, max_groups=5))
            for _ in range(2):
                # Whatever is on the way now is cut off: before the store, after it, or with the receipt on the wire.
                await asyncio.sleep(0.02)
                broker.kill()
                await broker.start()
            trained = await _train_all(client)
            receipt = await sending
        books = await client.audit(RUN)
    assert sorted(trained) == sorted(group.prompt.group_id for group in made)
    assert receipt.refused == []
    assert receipt.num_samples <= 2 * NUM_GROUPS
    assert books.balanced
    assert (books.submitted, books.trained, books.in_flight) == (2 * NUM_GROUPS, 2 * NUM_GROUPS, 0)


async def test_a_killed_run_of_agents_resumes_from_a_checkpoint_older_than_what_is_retained(
    broker: BrokerProcess,
) -> None:
    """Broker and trainer are killed at version 12; the newest checkpoint is of 2, and two steps are retained."""
    policy, agents = broker_pb2.RunPolicy(num_retained_steps=2), limits(groups_per_step=2, max_staleness=1)
    await broker.start()
    async with asyncio.timeout(TIMEOUT_S), BrokerClient(broker.address) as client:
        await client.open_run(RUN, limits=agents, policy=policy, policy_version=0)
        for version in range(12):
            await _put_and_train(client, version, f"old{version}")
        broker.kill()
        await broker.start()
        opened = await client.open_run(RUN, limits=agents, policy=policy, policy_version=2, takes_over=True)
        # Steps 3 to 10 are gone; 11 and 12 are there, but weights that exist no more sampled them.
        assert (opened.policy_version, opened.history, opened.num_samples_abandoned) == (2, 1, 8 * 4)
        books = await client.audit(RUN)
        assert (books.trained, dict(books.dropped)) == (2 * 4, {"abandoned_step": 8 * 4, "abandoned_version": 2 * 4})
        assert (books.balanced, books.in_flight) == (True, 0)
        for version in range(2, 14):
            await _put_and_train(client, version, f"new{version}")
        books = await client.audit(RUN)
    assert (books.policy_version, books.trained, books.in_flight, books.balanced) == (14, 14 * 4, 0, True)


async def _put_and_train(client: BrokerClient, version: int, prefix: str) -> None:
    """One step of two groups that agents sampled from `version`."""
    made = [group(f"{prefix}-{number}", version=version) for number in range(2)]
    async with TrajectorySession(client, run_id=RUN, producer_id="p") as producer:
        assert (await producer.store(made)).num_samples == 4
    async with client.consumer(RUN, "rank-0", max_held_groups=2, max_groups=2) as session:
        step: list[str] = []
        while len(step) < 2:
            microbatch = await session.next(timeout_s=TIMEOUT_S)
            assert microbatch is not None
            step += [member.prompt.group_id for member in microbatch.groups]
    assert sorted(step) == [member.prompt.group_id for member in made]
    await client.ack_step(RUN, consumer_id="rank-0", group_ids=step, policy_version=version + 1)


async def _train_all(client: BrokerClient) -> list[str]:
    """Train on whatever comes, in whole steps; the ids in order."""
    trained: list[str] = []
    async with client.consumer(RUN, "rank-0", max_held_groups=GROUPS_PER_STEP) as session:
        while len(trained) < NUM_GROUPS:
            step: list[str] = []
            while len(step) < GROUPS_PER_STEP:
                microbatch = await session.next(timeout_s=TIMEOUT_S)
                assert microbatch is not None
                step += [group.prompt.group_id for group in microbatch.groups]
            version = len(trained) // GROUPS_PER_STEP + 1
            await client.ack_step(RUN, consumer_id="rank-0", group_ids=step, policy_version=version)
            session.release(step)
            trained += step
    return trained
