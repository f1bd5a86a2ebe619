"""The background work that makes delivered samples compact: bounded, in few commits, and over when it fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.errors import ServiceUnavailableError
from penstock.v1 import types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from services.broker.records.stored_sample import StoredSample, compacted
from services.broker.records_pb2 import GroupRecord, SampleRecord
from services.broker.runtime import compactor
from services.broker.runtime.compactor import Compactor
from services.broker.state.run_state import RunState
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.waiting import until


def record(name: str, **changes: bool) -> GroupRecord:
    return GroupRecord(group_id=name, purpose=types_pb2.PURPOSE_TRAIN, samples=[SampleRecord()] * 2, **changes)


def tokens(count: int) -> StoredSample:
    return StoredSample(
        token_ids=int32_bytes(range(count)),
        logprobs=float32_bytes([-0.5] * count),
        policy_versions=encode_versions([0] * count),
        loss_mask=b"",
        text="",
        routes=b"",
    )


class Commits:
    """Counts transactions; they are answered once `may_end` is set, or fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.count, self._fails = 0, fails
        self.may_end = asyncio.Event()

    async def __call__(self, operation: Callable[[RunState], int]) -> int:
        self.count += 1
        await self.may_end.wait()
        if self._fails:
            raise ServiceUnavailableError("no store")
        return 0


async def test_deliveries_shortly_after_one_another_share_a_commit() -> None:
    work, commits = Compactor("r", MemoryStore()), Commits()
    commits.may_end.set()
    for name in ("a", "b", "c"):
        await work.offer(record(name), {0: tokens(3), 1: tokens(3)}, commits)
        for _ in range(5):
            await asyncio.sleep(0)
    await work.settled()
    assert commits.count == 1


async def test_a_delivery_waits_only_while_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor, "MAX_WAITING_BYTES", 100)
    monkeypatch.setattr(compactor, "COMMIT_BYTES", 1)
    work, commits = Compactor("r", MemoryStore()), Commits(fails=True)
    await work.offer(record("a"), {0: tokens(10), 1: tokens(10)}, commits)
    more = asyncio.create_task(work.offer(record("b"), {0: tokens(10)}, commits))
    await until(lambda: commits.count == 1)
    assert not more.done()
    commits.may_end.set()
    # Even if nothing can be stored.
    await more
    await work.settled()
    assert commits.count == 3


async def test_what_is_compact_or_not_trained_on_or_huge_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    work, commits = Compactor("r", MemoryStore()), Commits()
    evaluation = record("e")
    evaluation.purpose = types_pb2.PURPOSE_EVALUATE
    await work.offer(record("a", is_compact=True), {0: tokens(3)}, commits)
    await work.offer(evaluation, {0: tokens(3)}, commits)
    monkeypatch.setattr(compactor, "MAX_SAMPLE_BYTES", 1)
    await work.offer(record("b"), {0: tokens(3)}, commits)
    await work.settled()
    assert commits.count == 0


async def test_one_that_cannot_be_compacted_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor, "COMMIT_BYTES", 1)
    monkeypatch.setattr(compactor, "MAX_WAITING_BYTES", 100)
    work, commits = Compactor("r", MemoryStore()), Commits()
    commits.may_end.set()
    broken = replace(tokens(3), loss_mask=b"\1", token_ids=b"\1")
    await work.offer(record("a"), {0: broken, 1: tokens(20)}, commits)
    await work.offer(record("b"), {0: tokens(3)}, commits)
    await work.settled()
    assert commits.count == 2


async def test_the_loop_goes_on_while_a_large_one_is_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor, "THREAD_BYTES", 100)
    threads: list[int] = []

    def noted(sample: StoredSample) -> bytes:
        threads.append(threading.get_ident())
        return compacted(sample)

    monkeypatch.setattr(compactor, "compacted", noted)
    work, commits = Compactor("r", MemoryStore()), Commits()
    commits.may_end.set()
    await work.offer(record("a"), {0: tokens(100), 1: tokens(3)}, commits)
    await work.settled()
    assert [thread == threading.get_ident() for thread in threads] == [False, True]
