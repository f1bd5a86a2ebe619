"""The broker through a Sentinel fail-over, a lost Cluster node, and a slot that moves: real servers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from penstock.errors import ServiceUnavailableError
from services.broker.storage.redis.keys import RunKeys
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.brokers.broker import RUN, RunningBroker, prompt, serving
from tests.helpers.stores.redis_groups import ClusterGroup, SentinelGroup
from tests.helpers.waiting import until

WAIT_S = 40.0


@pytest.fixture(scope="module")
def sentinel_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelGroup]:
    group = SentinelGroup(tmp_path_factory.mktemp("sentinel"), num_replicas=2, num_sentinels=3)
    group.start()
    yield group
    group.stop()


@pytest.fixture
def sentinels(sentinel_group: SentinelGroup) -> SentinelGroup:
    """Shared and empty, with all servers in step."""
    sentinel_group.flush()
    return sentinel_group


@pytest.fixture(scope="module")
def cluster_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterGroup]:
    group = ClusterGroup(tmp_path_factory.mktemp("cluster"), is_persistent=True, node_timeout_ms=500)
    group.start()
    yield group
    group.stop()


@pytest.fixture
def cluster(cluster_group: ClusterGroup) -> ClusterGroup:
    """Shared and empty. The test that moves a slot comes last."""
    cluster_group.flush()
    return cluster_group


class Submitter:
    """Submits one prompt after the other to a pair of brokers, and remembers which ones were answered for."""

    def __init__(self, *brokers: RunningBroker, faults: list[str]) -> None:
        self._brokers = brokers
        self.stored: list[str] = []
        self.num_refused = 0
        self.faults = faults
        """Kinds of those that the brokers met in Redis, retried ones too."""
        self.is_stopping = False

    async def run(self) -> None:
        """Until told to stop; never in the middle of a call."""
        number = 0
        while not self.is_stopping:
            name = f"g{number}"
            try:
                response = await self._brokers[number % len(self._brokers)].submit(prompt(name))
            except ServiceUnavailableError:
                self.num_refused += 1
                await asyncio.sleep(0.05)
                continue
            assert not response.errors
            self.stored.append(name)
            number += 1
            await asyncio.sleep(0.002)

    async def stores_more(self, count: int) -> None:
        """Until `count` further prompts are stored."""
        goal = len(self.stored) + count
        await until(lambda: len(self.stored) >= goal, timeout_s=WAIT_S)


@asynccontextmanager
async def submitting(url: str, *, num_wait_replicas: int = 0) -> AsyncIterator[Submitter]:
    """Two brokers on one Redis, and a client of both that submits all the while."""
    faults: list[str] = []
    stores = [RedisStore.from_url(url, num_wait_replicas=num_wait_replicas, on_fault=faults.append) for _ in range(2)]
    try:
        async with serving(stores[0]) as one, serving(stores[1]) as two:
            await one.open(max_queued_groups=100_000)
            submitter = Submitter(one, two, faults=faults)
            task = asyncio.create_task(submitter.run())
            try:
                await submitter.stores_more(20)
                yield submitter
            finally:
                submitter.is_stopping = True
                await task
            for broker in (one, two):
                assert (await broker.audit()).submitted == 2 * len(submitter.stored)
                assert set(broker.run_registry.replica(RUN).copy.groups) == set(submitter.stored)  # type: ignore[union-attr]
    finally:
        for store in stores:
            await store.close()


async def test_without_enough_replicas_nothing_is_answered_for(sentinels: SentinelGroup) -> None:
    store = RedisStore.from_url(sentinels.url, num_wait_replicas=3)
    async with serving(store) as broker:
        with pytest.raises(ServiceUnavailableError, match="2 of 3 replicas") as caught:
            await broker.open()
        assert caught.value.metadata["redis_fault"] == "too_few_replicas"
    await store.close()


async def test_a_master_that_hangs_and_comes_back_as_a_replica_takes_nothing_along(sentinels: SentinelGroup) -> None:
    master = sentinels.master()
    # All of them: with one, the replica that is not promoted may confirm for a moment what the old master still takes.
    async with submitting(sentinels.url, num_wait_replicas=2) as submitter:
        master.pause()
        try:
            await until(lambda: sentinels.master() is not master, timeout_s=WAIT_S)
        finally:
            master.resume()
        await submitter.stores_more(50)


async def test_a_fail_over_loses_nothing_that_replicas_were_waited_for(sentinels: SentinelGroup) -> None:
    master = sentinels.master()
    try:
        async with submitting(sentinels.url, num_wait_replicas=1) as submitter:
            master.kill()
            await submitter.stores_more(50)
            assert sentinels.master() is not master
            # A quick fail-over refuses nobody: what it met was tried again in time.
            assert submitter.faults
    finally:
        # Not while anything is stored: of two replicas, the one that did not confirm it might be promoted next.
        sentinels.restart_as_replica(master)
        await until(sentinels.is_whole, timeout_s=WAIT_S)


async def test_a_cluster_that_loses_a_node_is_waited_for(cluster: ClusterGroup) -> None:
    owner = cluster.owner(RunKeys(RUN).run)
    async with submitting(cluster.url) as submitter:
        owner.kill()

        await until(lambda: submitter.num_refused > 0, timeout_s=WAIT_S)
        owner.start()
        await submitter.stores_more(50)


async def test_a_slot_that_moves_is_followed(cluster: ClusterGroup) -> None:
    key = RunKeys(RUN).run
    owner = cluster.owner(key)
    target = next(node for node in cluster.nodes if node is not owner)
    async with submitting(cluster.url) as submitter:
        await asyncio.to_thread(cluster.move, key, target)
        await submitter.stores_more(50)
        assert target.command("EXISTS", key) == 1
