"""Token shards whose owners die, or that two processes are both sure to own, on every store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2
from services.broker.records.shard_ids import shard_id
from services.broker.records.store import Store
from services.broker.runtime import removal
from tests.helpers.brokers.broker import RUN
from tests.helpers.brokers.sharded_run import STOP, DyingStore, ShardedRun, chunk_of, put, reasons

pytestmark = pytest.mark.slow

NUM_SAMPLES, NUM_CHUNKS = 6, 12
FINISHED = broker_pb2.SAMPLE_STATE_FINISHED


@pytest.fixture
async def run(store: Store) -> AsyncIterator[ShardedRun]:
    run = ShardedRun(store)
    names = [f"g{number}" for number in range(NUM_SAMPLES)]
    await run.open(*names)
    yield run
    await run.settled()


async def test_two_owners_together_lose_no_token_and_double_none(run: ShardedRun) -> None:
    numbers, owners = random.Random(1), [run.process(), run.process()]
    leases = await run.lease(NUM_SAMPLES)

    async def generate(lease: broker_pb2.Lease) -> None:
        for offset in range(NUM_CHUNKS):
            finish = {"finish": STOP} if offset == NUM_CHUNKS - 1 else {}
            sent = chunk_of(lease, [offset], offset=offset, **finish)
            # Now and then both get it, as when a client changes over in the midst of a request.
            asked = owners if numbers.random() < 0.5 else [numbers.choice(owners)]
            for accepted in await asyncio.gather(
                *(owner.accept(RUN, lease.token_shard, "gen-1", [sent]) for owner in asked)
            ):
                assert reasons(accepted) == []

    await asyncio.gather(*map(generate, leases))
    for lease in leases:
        assert await run.tokens(lease) == list(range(NUM_CHUNKS))
        sample = run.sample((lease.key.group_id, 0))
        assert (sample.state, sample.num_tokens) == (FINISHED, NUM_CHUNKS)
    assert sum(owner.num_conflicts for owner in owners) > 0
    for owner in owners * 2:
        # Once to report what is left, then to count.
        await owner.look()
        await run.settled()
    [shard] = {lease.token_shard for lease in leases}
    replicas = [owner.replica(RUN, shard) for owner in owners]
    for name, number in (("commits", "num_commits"), ("commit_conflicts", "num_conflicts")):
        counted = run.registry.get_sample_value(f"penstock_broker_shard_{name}_total", {"run": RUN})
        assert counted == sum(getattr(replica, number) for replica in replicas)


async def test_a_lease_sealed_by_one_owner_gets_nothing_more_at_another(run: ShardedRun) -> None:
    first, second = run.process(), run.process()
    [lease] = await run.lease()
    await put(first, lease, [1])
    await run.expire()
    results = await asyncio.gather(put(first, lease, [2], offset=1), run.seal(second, lease))
    was_stored = not reasons(results[0])
    assert results[1].num_tokens == 1 + was_stored
    [again] = await run.lease(generator_id="gen-2")
    assert again.key.group_id == lease.key.group_id
    assert reasons(await put(second, again, [9], offset=1 + was_stored, holder="gen-2")) == []
    # The first owner's copy still has the old lease.
    assert reasons(await put(first, lease, [3], offset=1 + was_stored)) == ["LEASE_LOST"]
    assert await run.tokens(again) == [1, *([2] if was_stored else []), 9]


@pytest.mark.parametrize("fate", ["before", "after"])
async def test_an_owner_that_dies_in_a_commit_is_followed_by_one_that_goes_on(run: ShardedRun, fate: str) -> None:
    [lease] = await run.lease()
    await put(run.process(), lease, [0])
    for offset in range(1, 4):
        finish = {"finish": STOP} if offset == 3 else {}
        sent = chunk_of(lease, [offset], offset=offset, **finish)
        dying = run.process(DyingStore(run.store, [fate]))
        with pytest.raises(ServiceUnavailableError):
            await dying.accept(RUN, lease.token_shard, "gen-1", [sent])
        accepted = await run.process().accept(RUN, lease.token_shard, "gen-1", [sent])
        assert (reasons(accepted), len(accepted.repeated)) == ([], int(fate == "after"))
    assert await run.tokens(lease) == [0, 1, 2, 3]
    assert run.sample((lease.key.group_id, 0)).state == FINISHED


async def test_one_owner_outlives_answers_that_were_lost(run: ShardedRun) -> None:
    numbers = random.Random(2)
    fates = [numbers.choice(["before", "after", ""]) for _ in range(3 * NUM_CHUNKS)]
    owner = run.process(DyingStore(run.store, fates))
    [lease] = await run.lease()
    for offset in range(NUM_CHUNKS):
        finish = {"finish": STOP} if offset == NUM_CHUNKS - 1 else {}
        sent = chunk_of(lease, [offset], offset=offset, **finish)
        for _ in range(3 * NUM_CHUNKS):
            with suppress(ServiceUnavailableError):
                assert reasons(await owner.accept(RUN, lease.token_shard, "gen-1", [sent])) == []
                break
    assert await run.tokens(lease) == list(range(NUM_CHUNKS))
    assert run.sample((lease.key.group_id, 0)).state == FINISHED


async def test_a_deleted_run_leaves_no_shard(run: ShardedRun) -> None:
    owner, leases = run.process(), await run.lease(NUM_SAMPLES)
    for number, lease in enumerate(leases):
        await put(owner, lease, [number], **({"finish": STOP} if number % 2 else {}))
    response = await removal.delete(run.core, is_forced=True)
    assert response.is_complete
    documents = [shard_id(RUN, shard) for shard in (1, 2, 3)]
    assert await run.store.roots([RUN, *documents]) == [None] * 4
    assert [await run.tokens(lease) for lease in leases] == [[]] * NUM_SAMPLES
