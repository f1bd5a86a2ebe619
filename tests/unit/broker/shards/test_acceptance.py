"""Which chunks a token shard stores, and what it says of the others."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import RunClosedError, UnknownRunError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import drops
from services.broker.records.shard_ids import shard_id
from services.broker.records.stored_sample import read_sample
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RUN
from tests.helpers.brokers.sharded_run import ABORTED, STOP, ShardedRun, chunk_of, put, reasons

QUEUED, LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
FINISHED = broker_pb2.SAMPLE_STATE_FINISHED


async def sharded(*group_ids: str, **changes: Any) -> ShardedRun:
    run = ShardedRun(MemoryStore())
    await run.open(*group_ids or ("a",), **changes)
    return run


async def test_chunks_are_stored_in_the_shard_and_the_run_learns_of_the_end() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    assert reasons(await put(process, lease, [1, 2])) == []
    assert run.reports == []
    assert reasons(await put(process, lease, [3], offset=2, finish=STOP)) == []
    assert await run.tokens(lease) == [1, 2, 3]
    assert await run.store.chunks(RUN, [("a", 0)]) == [[]]
    sample = run.sample(("a", 0))
    assert (sample.state, sample.num_tokens, sample.min_version) == (FINISHED, 3, 0)
    assert sample.stored_bytes > 0


async def test_one_request_may_begin_and_continue_many_samples() -> None:
    run = await sharded("a", "b", "c")
    process, leases = run.process(), await run.lease(3)
    shard = leases[0].token_shard
    first = [chunk_of(lease, [number]) for number, lease in enumerate(leases)]
    both = [*first, *(chunk_of(lease, [9], offset=1) for lease in leases)]
    assert reasons(await process.accept(RUN, shard, "gen-1", both)) == []
    assert [await run.tokens(lease) for lease in leases] == [[0, 9], [1, 9], [2, 9]]


async def test_a_repeated_chunk_is_recognised_before_and_after_the_end_and_at_rest() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    first, last = chunk_of(lease, [1, 2]), chunk_of(lease, [3], offset=2, finish=STOP)
    await process.accept(RUN, lease.token_shard, "gen-1", [first])
    assert (await process.accept(RUN, lease.token_shard, "gen-1", [first])).repeated == [first]
    await process.accept(RUN, lease.token_shard, "gen-1", [last])
    await process.look()
    state = process.replica(RUN, lease.token_shard).copy
    assert state is not None
    assert list(state.at_rest) == ["a"]
    accepted = await process.accept(RUN, lease.token_shard, "gen-1", [first, last])
    assert (accepted.errors, accepted.repeated) == ([], [first, last])
    assert await run.tokens(lease) == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "holder", "reason"),
    [
        ({"offset": 3}, "gen-1", "OFFSET_MISMATCH"),
        ({"version": 7}, "gen-1", "INVALID_FIELD"),
        ({"lease_id": "0.0.0_1.other"}, "gen-1", "LEASE_LOST"),
        ({}, "gen-2", "LEASE_LOST"),
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
async def test_a_chunk_that_does_not_continue_its_lease_is_refused(
    changes: dict[str, Any], holder: str, reason: str, is_known: bool
) -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    if is_known:
        await put(process, lease, [1, 2])
        changes = {"offset": 2} | changes
    assert reasons(await put(process, lease, [3], holder=holder, **changes)) == [reason]
    assert await run.tokens(lease) == ([1, 2] if is_known else [])


async def test_more_tokens_than_the_run_allows_are_refused() -> None:
    run = await sharded(max_completion_tokens=16)
    process, [lease] = run.process(), await run.lease()
    accepted = await put(process, lease, range(17))
    assert [error.message for error in accepted.errors] == ["17 completion tokens, but the run allows 16"]


async def test_chunks_of_nothing_the_run_leased_are_refused_and_make_no_shard() -> None:
    run = await sharded("a", "b")
    process, [lease] = run.process(), await run.lease()
    nobody, beyond, wrong = broker_pb2.Lease(), broker_pb2.Lease(), broker_pb2.Lease()
    for other in (nobody, beyond, wrong):
        other.CopyFrom(lease)
    nobody.key.group_id, beyond.key.sample_index = "nobody", 5
    wrong.token_shard = lease.token_shard % 3 + 1
    assert reasons(await put(process, nobody, [1])) == ["UNKNOWN_SAMPLE"]
    assert reasons(await put(process, beyond, [1])) == ["UNKNOWN_SAMPLE"]
    [error] = (await put(process, wrong, [1])).errors
    assert (error.reason, error.message) == (
        "INVALID_FIELD",
        f"token_shard: {wrong.token_shard}; its lease says {lease.token_shard}",
    )
    documents = [shard_id(RUN, shard) for shard in (1, 2, 3)]
    assert await run.store.roots(documents) == [None, None, None]


async def test_the_next_version_is_accepted_as_soon_as_the_run_has_it() -> None:
    run = await sharded(max_staleness=2)
    process, [lease] = run.process(), await run.lease()
    await put(process, lease, [1])

    def advance(state: Any) -> None:
        state.run.policy_version = 1

    await run.core.transact(advance)
    assert reasons(await put(process, lease, [2], offset=1, version=1)) == []


async def test_a_closed_run_and_one_that_is_gone_take_nothing() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    await put(process, lease, [1])

    def close(state: Any) -> None:
        state.run.is_closed = True

    await run.core.transact(close)
    run.clock.advance(2.0)
    with pytest.raises(RunClosedError):
        await put(process, lease, [2], offset=1)

    def open_again(state: Any) -> None:
        state.run.is_closed = False

    await run.core.transact(open_again)
    assert reasons(await put(process, lease, [2], offset=1)) == []
    [root] = await run.store.roots([RUN])
    assert root is not None
    await run.store.delete(RUN, root.mark)
    run.clock.advance(2.0)
    with pytest.raises(UnknownRunError):
        await put(process, lease, [3], offset=2)
    await process.look()
    assert await run.store.roots([shard_id(RUN, lease.token_shard)]) == [None]


async def test_a_returned_sample_is_continued_by_its_next_lease() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    await put(process, lease, [1, 2])
    assert reasons(await put(process, lease, [3], offset=2, finish=ABORTED)) == []
    assert run.sample(("a", 0)).state == QUEUED
    [again] = await run.lease(generator_id="gen-2")
    assert again.token_shard == lease.token_shard
    assert reasons(await put(process, lease, [4], offset=3)) == ["LEASE_LOST"]
    assert reasons(await put(process, again, [5], holder="gen-2", offset=3)) == []
    assert reasons(await put(process, lease, [4], offset=4)) == ["LEASE_LOST"]
    assert await run.tokens(again) == [1, 2, 3, 5]


async def test_a_restarted_sample_begins_with_nothing() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    await put(process, lease, [1, 2])

    def restart(state: Any) -> None:
        with state.edit("a") as group:
            drops.reset_sample(state, group, 0)

    await run.core.transact(restart)
    [again] = await run.lease()
    assert again.key.attempt == 1
    assert reasons(await put(process, again, [7])) == []
    assert await run.tokens(again) == [7]
    assert reasons(await put(process, lease, [3], offset=2)) == ["LEASE_LOST"]


async def test_a_lease_of_other_tokens_than_the_shard_has_is_refused_and_counted_until_it_is_sealed() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    await put(process, lease, [1, 2])

    def lose(state: Any) -> None:
        # As after a crash of the store that took the run's last second.
        with state.edit("a") as group:
            group.samples[0].state = QUEUED

    await run.core.transact(lose)
    [again] = await run.lease()
    assert reasons(await put(process, again, [3])) == ["LEASE_LOST"]
    assert process.replica(RUN, lease.token_shard).num_mismatches == 1
    await run.expire()
    assert (await run.seal(process, again)).num_tokens == 2
    [third] = await run.lease()
    assert reasons(await put(process, third, [3], offset=2)) == []
    assert await run.tokens(third) == [1, 2, 3]


async def test_the_shard_of_an_earlier_run_of_that_id_is_deleted_first() -> None:
    run = await sharded()
    earlier, [lease] = run.process(), await run.lease()
    await put(earlier, lease, [1, 2])
    [root] = await run.store.roots([RUN])
    assert root is not None
    await run.store.delete(RUN, root.mark)
    later = ShardedRun(run.store)
    later.clock.advance(5.0)
    await later.open("a")
    [again] = await later.lease()
    assert reasons(await put(later.process(), again, [9])) == []
    assert await later.tokens(again) == [9]
    # A process that still believes in the earlier run takes the present one's shard for no leftover.
    assert reasons(await put(earlier, again, [10], offset=1)) == []
    await earlier.look()
    assert await later.tokens(again) == [9, 10]


async def test_a_shard_stores_routes_and_knows_how_many_its_sample_has() -> None:
    run = await sharded(routing=types_pb2.RoutingShape(num_layers=1, num_experts=8, experts_per_token=2))
    process, [lease] = run.process(), await run.lease()
    # A prompt of three tokens, two of whose rows come first; refused before the lease is known, and after.
    for _ in range(2):
        [error] = (await put(process, lease, [1, 2], routes=bytes(4))).errors
        assert error.message == "routes: 4 bytes; 4 rows of 2 bytes are 8"
    assert reasons(await put(process, lease, [1, 2], routes=bytes(range(8)))) == []
    assert reasons(await put(process, lease, [3], offset=2, finish=STOP, routes=bytes([7, 6]))) == []
    [parts] = await run.store.chunks(shard_id(RUN, lease.token_shard), [("a", 0)])
    assert read_sample(parts).routes == bytes([*range(8), 7, 6])
