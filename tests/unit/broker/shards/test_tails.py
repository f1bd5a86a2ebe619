"""What a token shard seals, tells its run, compacts and forgets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.errors import ServiceUnavailableError
from penstock.v1 import broker_pb2
from services.broker.operations.compaction import CompactSample
from services.broker.records.shard_ids import shard_id
from services.broker.records.store import Store
from services.broker.shards.compacting import compact
from services.broker.shards.run_facts import MAX_PROGRESS_EVERY_S
from services.broker.shards.shard_registry import IDLE_SHARD_S
from services.broker.shards.shard_replica import CLEAN_EVERY_S, REPORT_AGAIN_AFTER_S
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RUN, duration
from tests.helpers.brokers.sharded_run import ABORTED, STOP, ShardedRun, chunk_of, put, reasons, seal_request

QUEUED, LEASED = broker_pb2.SAMPLE_STATE_QUEUED, broker_pb2.SAMPLE_STATE_LEASED
SEALING, FINISHED = broker_pb2.SAMPLE_STATE_SEALING, broker_pb2.SAMPLE_STATE_FINISHED


async def sharded(*group_ids: str, **changes: Any) -> ShardedRun:
    run = ShardedRun(MemoryStore())
    await run.open(*group_ids or ("a",), **changes)
    return run


@pytest.mark.parametrize("num_stored", [0, 2])
async def test_nothing_is_stored_under_a_sealed_lease(num_stored: int) -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    if num_stored:
        await put(process, lease, [1, 2])
    await run.expire()
    tail = await run.seal(process, lease)
    assert (tail.num_tokens, tail.is_sealed, tail.lease_id) == (num_stored, True, lease.lease_id)
    assert reasons(await put(process, lease, [3], offset=num_stored)) == ["LEASE_LOST"]
    assert run.sample(("a", 0)).num_tokens == num_stored
    [again] = await run.lease()
    assert reasons(await put(process, again, [3], offset=num_stored)) == []
    assert await run.tokens(again) == [*[1, 2][:num_stored], 3]


async def test_a_seal_of_a_lease_that_another_one_followed_disturbs_nothing() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    await put(process, lease, [1])
    await run.expire()
    await run.seal(process, lease)
    [again] = await run.lease()
    await put(process, again, [2], offset=1)
    [late] = await process.seal(RUN, lease.token_shard, [seal_request(lease)])
    assert late.lease_id == lease.lease_id
    assert reasons(await put(process, again, [3], offset=2)) == []


async def test_a_seal_that_comes_once_all_is_over_disturbs_nothing() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    await run.expire()
    await run.seal(process, lease)
    [again] = await run.lease()
    await put(process, again, [1, 2], finish=STOP)
    await process.look()
    [late] = await process.seal(RUN, lease.token_shard, [seal_request(lease)])
    assert (late.lease_id, late.num_tokens, late.finish_reason) == (lease.lease_id, 2, STOP)
    assert await run.tokens(again) == [1, 2]


class HeldStore:
    """Answers a question for records only once `gate` is set."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_asked, self.gate = asyncio.Event(), asyncio.Event()

    async def records(self, run_id: str, names: Sequence[str]) -> list[bytes | None]:
        found = await self._store.records(run_id, names)
        self.is_asked.set()
        await self.gate.wait()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("is_finished", [False, True])
async def test_an_owner_that_was_held_between_reading_and_deciding_changes_nothing(is_finished: bool) -> None:
    run = await sharded()
    [lease] = await run.lease()
    held_store = HeldStore(run.store)
    first = chunk_of(lease, [1, 2])
    held = asyncio.create_task(run.process(held_store).accept(RUN, lease.token_shard, "gen-1", [first]))
    await held_store.is_asked.wait()
    # Its client goes to another owner meanwhile.
    other = run.process()
    await other.accept(RUN, lease.token_shard, "gen-1", [first])
    await put(other, lease, [3], offset=2, **({"finish": STOP} if is_finished else {}))
    await other.look()
    held_store.gate.set()
    accepted = await held
    # At rest the lease is known to be over, but not by its whole id.
    assert len(accepted.repeated) == (0 if is_finished else 1)
    assert await run.tokens(lease) == [1, 2, 3]


async def test_a_lease_without_a_chunk_seals_what_came_before_it() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    await put(process, lease, [1, 2], finish=ABORTED)
    [again] = await run.lease()
    await run.expire()
    tail = await run.seal(process, again)
    assert (tail.num_tokens, tail.finish_reason) == (2, 0)
    assert (run.sample(("a", 0)).state, run.sample(("a", 0)).num_tokens) == (QUEUED, 2)
    assert reasons(await put(process, again, [3], offset=2)) == ["LEASE_LOST"]


async def test_a_sample_that_ended_unheard_is_finished_by_the_seal() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    run.is_away = True
    with pytest.raises(ServiceUnavailableError):
        await put(process, lease, [1, 2], finish=STOP)
    run.is_away = False
    await run.expire()
    assert run.sample(("a", 0)).state == SEALING
    tail = await run.seal(run.process(), lease)
    assert (tail.num_tokens, tail.finish_reason) == (2, STOP)
    assert run.sample(("a", 0)).state == FINISHED


async def test_an_end_that_did_not_reach_the_run_is_reported_until_it_does() -> None:
    run = await sharded()
    first, [lease] = run.process(), await run.lease()
    run.is_away = True
    last = chunk_of(lease, [1, 2], finish=STOP)
    with pytest.raises(ServiceUnavailableError):
        await first.accept(RUN, lease.token_shard, "gen-1", [last])
    await first.look()
    run.is_away = False
    # The process dies; another one looks after the shard.
    second = run.process()
    await second.attend(RUN, lease.token_shard)
    await second.look()
    assert (run.sample(("a", 0)).state, run.sample(("a", 0)).num_tokens) == (FINISHED, 2)
    run.clock.advance(REPORT_AGAIN_AFTER_S)
    await second.look()
    assert len(run.reports) == 1


async def test_a_repeated_end_is_answered_only_once_the_run_knows_of_it() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    last = chunk_of(lease, [1, 2], finish=STOP)
    run.is_away = True
    for _ in range(2):
        with pytest.raises(ServiceUnavailableError):
            await process.accept(RUN, lease.token_shard, "gen-1", [last])
    run.is_away = False
    accepted = await process.accept(RUN, lease.token_shard, "gen-1", [last])
    assert accepted.repeated == [last]
    assert run.sample(("a", 0)).state == FINISHED


async def test_the_run_hears_now_and_then_how_far_samples_are() -> None:
    run = await sharded("a", "b")
    process, [one, two] = run.process(), await run.lease(2)
    await put(process, one, [1, 2])
    await process.look()
    assert run.sample(("a", 0)).num_tokens == 2
    await put(process, one, [3], offset=2)
    await put(process, two, [4])
    await process.look()
    assert run.sample(("a", 0)).num_tokens == 2
    run.clock.advance(MAX_PROGRESS_EVERY_S)
    await process.look()
    assert [run.sample((name, 0)).num_tokens for name in ("a", "b")] == [3, 1]
    run.clock.advance(MAX_PROGRESS_EVERY_S)
    await process.look()
    assert len(run.reports) == 3


async def test_all_shards_of_a_process_report_by_one_call() -> None:
    run = await sharded("a", "b", "c")
    process = run.process()
    leases = {name: (await run.lease(generator_id=name))[0] for name in ("gen-1", "gen-2", "gen-3")}
    assert len({lease.token_shard for lease in leases.values()}) > 1
    for number, (name, lease) in enumerate(leases.items(), 1):
        await put(process, lease, range(number), holder=name)
    await process.look()
    assert [run.sample((name, 0)).num_tokens for name in ("a", "b", "c")] == [1, 2, 3]
    assert run.num_calls == 1


@pytest.mark.parametrize(("silence_s", "due_s"), [(2, 0.5), (600, MAX_PROGRESS_EVERY_S)])
async def test_the_run_hears_of_tokens_long_before_it_takes_their_generator_for_silent(
    silence_s: int, due_s: float
) -> None:
    run = await sharded(token_silence=duration(silence_s))
    process, [lease] = run.process(), await run.lease()
    await put(process, lease, [1])
    await process.look()
    await put(process, lease, [2], offset=1)
    run.clock.advance(due_s / 2)
    await process.look()
    assert run.sample(("a", 0)).num_tokens == 1
    run.clock.advance(due_s / 2)
    await process.look()
    assert run.sample(("a", 0)).num_tokens == 2


async def test_an_end_on_its_way_to_the_run_is_not_reported_twice_at_once() -> None:
    run = await sharded()
    process, [lease] = run.process(), await run.lease()
    await put(process, lease, [1])
    await process.look()
    run.is_away = True
    with pytest.raises(ServiceUnavailableError):
        await put(process, lease, [2], offset=1, finish=STOP)
    run.is_away = False
    run.reports.clear()
    for _ in range(2):
        assert run.reports == []
        run.clock.advance(REPORT_AGAIN_AFTER_S)
        await process.look()
    assert run.sample(("a", 0)).state == FINISHED


async def test_what_the_run_has_no_more_use_for_is_deleted() -> None:
    run = await sharded("a", "b", "c")
    process, leases = run.process(), await run.lease(3)
    await put(process, leases[0], [1], finish=STOP)
    await put(process, leases[1], [2])
    await put(process, leases[2], [3])
    await run.drop("a", "b")
    run.clock.advance(CLEAN_EVERY_S)
    await process.look()
    assert [await run.tokens(lease) for lease in leases] == [[], [], [3]]
    document = shard_id(RUN, leases[0].token_shard)
    assert await run.store.records(document, ["a", "b"]) == [None, None]
    assert reasons(await put(process, leases[1], [9], offset=1)) == ["UNKNOWN_SAMPLE"]


async def test_an_unowned_shard_of_a_closed_run_is_cleaned_and_one_of_another_owner_is_not() -> None:
    run = await sharded("a", "b")
    process, leases = run.process(), await run.lease(2)
    await put(process, leases[0], [1])
    await put(process, leases[1], [2])
    process.is_ours = lambda _run_id, _shard: False
    await run.drop("a")
    run.clock.advance(CLEAN_EVERY_S)
    await process.look()
    assert await run.tokens(leases[0]) == [1]

    def close(state: RunState) -> None:
        state.run.is_closed = True

    await run.core.transact(close)
    run.clock.advance(CLEAN_EVERY_S)
    await process.look()
    assert [await run.tokens(lease) for lease in leases] == [[], [2]]
    run.clock.advance(IDLE_SHARD_S)
    await process.look()
    assert process.replica(RUN, leases[0].token_shard).copy is None


async def test_only_samples_that_ended_as_they_were_read_are_compacted() -> None:
    run = await sharded("a", "b", "c")
    process, leases = run.process(), await run.lease(3)
    await put(process, leases[0], [1], finish=STOP)
    await put(process, leases[1], [2])
    await process.look()
    samples = [
        CompactSample(sample=(name, 0), attempt=attempt, payload=b"compact")
        for name, attempt in (("a", 0), ("b", 0), ("c", 0))
    ]
    shard = leases[0].token_shard
    assert await compact(run.store, RUN, shard, samples) == [True, False, False]
    assert await compact(run.store, RUN, shard % 3 + 1, samples) == [False, False, False]
    stored = await run.store.chunks(shard_id(RUN, shard), [("a", 0), ("c", 0)])
    assert stored == [[b"compact"], []]
