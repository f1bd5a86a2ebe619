"""The cache of what passes through a broker: complete answers, whatever other calls do meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.v1 import types_pb2
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
