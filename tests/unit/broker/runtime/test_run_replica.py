"""Transactions of one broker process: decided in order, committed together, each answered for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.clock import SystemClock
from penstock.errors import InvalidFieldError, ServiceUnavailableError
from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations import append_tokens, submission
from services.broker.records.store import Delta, Mark
from services.broker.replicas import document_replica as replica_module
from services.broker.runtime.run_replica import RunReplica
from services.broker.runtime.stream_listeners import Topic
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import chunk, limits, prompt
from tests.unit.broker.builders import as_lease, lease, read_chunk


class SlowStore(MemoryStore):
    """Counts commits; while `gate` is clear they wait."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_commits = 0
        self.is_away = False

    async def commit(self, run_id: str, expected: Mark | None, delta: Delta) -> Mark:
        await self.gate.wait()
        if self.is_away:
            raise ServiceUnavailableError("the store is away")
        mark = await super().commit(run_id, expected, delta)
        self.num_commits += 1
        return mark


async def open_hub(store: MemoryStore) -> RunReplica:
    replica = RunReplica("run-1", store=store, clock=SystemClock())
    await replica.open(broker_pb2.OpenRunRequest(run_id="run-1", limits=limits(max_queued_groups=1000)))
    return replica


def submit(state: RunState, name: str) -> int:
    submission.submit(state, [prompt(name)], retired=(), now_s=1.0)
    return state.run.last_sequence


async def submit_all(replica: RunReplica, *names: str) -> list[object]:
    calls = [replica.transact(lambda state, name=name: submit(state, name)) for name in names]
    return list(await asyncio.gather(*calls, return_exceptions=True))


async def test_what_waits_during_a_commit_is_committed_by_the_next_one_in_order() -> None:
    store = SlowStore()
    replica = await open_hub(store)
    store.gate.clear()
    first = asyncio.create_task(replica.transact(lambda state: submit(state, "first")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rest = asyncio.create_task(submit_all(replica, *(f"g{number}" for number in range(20))))
    await asyncio.sleep(0)
    store.gate.set()
    assert await first == 1
    assert await rest == list(range(2, 22))
    assert store.num_commits == 3


async def test_operations_that_take_long_are_committed_by_several_batches_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "MAX_DECIDING_S", -1.0)
    store = SlowStore()
    replica = await open_hub(store)
    assert await submit_all(replica, *(f"g{number}" for number in range(20))) == list(range(1, 21))
    assert store.num_commits == 21


async def test_an_operation_that_fails_leaves_no_trace_and_the_others_are_stored() -> None:
    replica = await open_hub(SlowStore())

    def spoil(state: RunState) -> None:
        submit(state, "spoilt")
        state.run.dropped["x"] += 1
        raise InvalidFieldError("no", field="x")

    def break_down(state: RunState) -> None:
        submit(state, "broken")
        raise RuntimeError("a fault of the broker")

    calls = [replica.transact(lambda state: submit(state, "a")), replica.transact(spoil), replica.transact(break_down)]
    calls += [replica.transact(lambda state: submit(state, "b"))]
    one, spoilt, broken, two = await asyncio.gather(*calls, return_exceptions=True)
    assert (one, two) == (1, 2)
    assert isinstance(spoilt, InvalidFieldError)
    assert isinstance(broken, RuntimeError)
    for state in (replica.copy, (await open_again(replica.store)).copy):
        assert state is not None
        assert set(state.groups) == {"a", "b"}
        assert (state.run.submitted, dict(state.run.dropped)) == (4, {})


async def open_again(store: MemoryStore) -> RunReplica:
    replica = RunReplica("run-1", store=store, clock=SystemClock())
    await replica.transact(lambda state: None)
    return replica


async def test_two_hubs_that_race_store_everything_once() -> None:
    store = SlowStore()
    one = await open_hub(store)
    two = await open_again(store)
    results = await asyncio.gather(
        submit_all(one, *(f"a{n}" for n in range(30))), submit_all(two, *(f"b{n}" for n in range(30)))
    )
    assert sorted(number for part in results for number in part) == list(range(1, 61))  # type: ignore[type-var]
    assert one.num_conflicts + two.num_conflicts >= 1
    await one.poll()
    assert one.copy is not None
    assert len(one.copy.groups) == 60


async def test_a_commit_of_unknown_outcome_fails_its_batch_and_the_next_one_starts_again() -> None:
    store = SlowStore()
    replica = await open_hub(store)
    store.is_away = True
    failed = await submit_all(replica, "a", "b")
    assert all(isinstance(error, ServiceUnavailableError) for error in failed)
    store.is_away = False
    assert await submit_all(replica, "c") == [1]


async def test_a_caller_that_goes_away_before_its_turn_changes_nothing() -> None:
    store = SlowStore()
    replica = await open_hub(store)
    store.gate.clear()
    first = asyncio.create_task(replica.transact(lambda state: submit(state, "first")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gone = asyncio.create_task(replica.transact(lambda state: submit(state, "gone")))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    store.gate.set()
    assert await first == 1
    assert await submit_all(replica, "last") == [2]


async def test_what_a_follower_does_is_part_of_the_commit_it_follows() -> None:
    store = SlowStore()
    replica = await open_hub(store)
    answers: list[asyncio.Future[int]] = []
    asked: list[int] = []

    def follower(state: RunState) -> Callable[[RunState], int] | None:
        asked.append(len(state.groups))
        return None if "late" in state.groups else lambda after: submit(after, "late")

    with replica.following(follower, answers.append):
        assert await submit_all(replica, "a", "b") == [1, 2]
        assert [await answer for answer in answers] == [3]
        assert store.num_commits == 2
        assert await submit_all(replica, "c") == [4]
    await submit_all(replica, "d")
    assert asked == [2, 4]
    assert len(answers) == 1


async def test_a_follower_that_fails_leaves_no_trace_in_the_commit_it_follows() -> None:
    replica = await open_hub(SlowStore())
    answers: list[asyncio.Future[None]] = []

    def spoil(state: RunState) -> None:
        submit(state, "spoilt")
        raise InvalidFieldError("no", field="x")

    with replica.following(lambda state: spoil, answers.append):
        assert await submit_all(replica, "a") == [1]
    assert isinstance(answers[0].exception(), InvalidFieldError)
    assert replica.copy is not None
    assert set(replica.copy.groups) == {"a"}


async def test_listeners_are_woken_by_changes_but_not_where_samples_only_grow() -> None:
    replica = await open_hub(SlowStore())
    await submit_all(replica, "a")
    (grant,) = await replica.transact(lambda state: lease(state, 1))

    async def decode(offset: int, *tokens: int, **more: Any) -> None:
        facts = read_chunk(chunk(as_lease(grant), list(tokens), offset=offset, **more))
        accepted = await replica.transact(lambda state: append_tokens.accept_chunks(state, "gen-1", [facts], 3.0))
        assert accepted.errors == []

    with replica.listening() as every, replica.listening(topic=Topic.END) as end:
        await decode(0, 5, 6)
        await decode(2, 7)
        assert not every.is_set()
        await decode(3, 8, finish=types_pb2.FINISH_REASON_STOP)
        assert every.is_set()
        every.clear()
        await submit_all(replica, "b")
        assert every.is_set()
        assert not end.is_set()
        await replica.transact(lambda state: setattr(state.run, "is_closed", True))
        assert end.is_set()


async def test_a_sample_that_grows_in_the_commit_of_another_change_wakes_listeners() -> None:
    store = SlowStore()
    replica = await open_hub(store)
    await submit_all(replica, "a")
    (grant,) = await replica.transact(lambda state: lease(state, 1))
    facts = read_chunk(chunk(as_lease(grant), [5, 6]))
    with replica.listening() as every:
        grown = replica.transact(lambda state: append_tokens.accept_chunks(state, "gen-1", [facts], 3.0))
        before = store.num_commits
        await asyncio.gather(submit_all(replica, "b"), grown)
        assert store.num_commits == before + 1
        assert every.is_set()
