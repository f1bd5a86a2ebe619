"""The cache of what passes through a broker: complete answers, whatever other calls do meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.v1 import types_pb2
from services.broker.records.store import PayloadSlice
from services.broker.runtime import payload_cache
from services.broker.runtime.payload_cache import PayloadCache
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.waiting import until


class SlowStore(MemoryStore):
    """Has every prompt; answers for `slow` when `is_ready` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.is_ready = asyncio.Event()

    async def prompts(self, run_id: str, group_ids: Sequence[str]) -> list[bytes | None]:
        """See `Store.prompts`."""
        self.asked += group_ids
        if "slow" in group_ids:
            await self.is_ready.wait()
        return [types_pb2.Prompt(group_id=group_id).SerializeToString() for group_id in group_ids]


async def test_prompts_evicted_while_others_are_read_are_answered_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payload_cache, "MAX_CACHED_PROMPTS", 2)
    store = SlowStore()
    cache = PayloadCache("r", store=store)
    await cache.prompts(["a"])
    asking = asyncio.create_task(cache.prompts(["a", "slow"]))
    await until(lambda: "slow" in store.asked)
    await cache.prompts(["b", "c"])
    store.is_ready.set()
    assert {group_id: prompt.group_id for group_id, prompt in (await asking).items()} == {"a": "a", "slow": "slow"}
    store.asked.clear()
    assert list(await cache.prompts(["a", "slow"])) == ["a", "slow"]
    assert store.asked == []


async def test_prompts_are_kept_as_far_as_their_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each has three bytes.
    monkeypatch.setattr(payload_cache, "MAX_CACHED_PROMPT_BYTES", 7)
    store = SlowStore()
    cache = PayloadCache("r", store=store)
    for group_id in ("a", "b", "a", "c", "a"):
        await cache.prompts([group_id])
    assert store.asked == ["a", "b", "c"]
    await cache.prompts(["b"])
    assert store.asked == ["a", "b", "c", "b"]


class CountingStore(MemoryStore):
    """Counts what is read back, and has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_read = 0

    async def payloads(self, run_id: str, slices: Sequence[PayloadSlice]) -> list[bytes]:
        """See `Store.payloads`."""
        self.num_read += len(slices)
        return [b""] * len(slices)


async def test_a_payload_is_kept_until_its_last_part_is_delivered_and_then_makes_room() -> None:
    store = CountingStore()
    cache = PayloadCache("r", store=store, max_bytes=20)
    cache.add("a", b"0123456789")
    first, second = PayloadSlice(payload_id="a", start=0, end=4), PayloadSlice(payload_id="a", start=4, end=10)
    assert await cache.load([second]) == [b"456789"]
    cache.add("b", b"abcdefghij")
    assert cache.at_hand(first) == b"0123"
    cache.note_delivered(first)
    assert cache.at_hand(first) is None, "nothing of it is due"
    cache.add("c", b"ABCDEFGHIJ")
    assert await cache.load([PayloadSlice(payload_id=name, start=0, end=10) for name in ("b", "c")]) == [
        b"abcdefghij",
        b"ABCDEFGHIJ",
    ]
    assert store.num_read == 0


async def test_a_part_that_is_delivered_again_is_read_back_at_worst() -> None:
    store = CountingStore()
    cache = PayloadCache("r", store=store)
    cache.add("a", b"0123456789")
    half = PayloadSlice(payload_id="a", start=0, end=5)
    assert await cache.load([half]) == await cache.load([half]) == [b"01234"]
    await cache.load([half])
    assert store.num_read == 1
