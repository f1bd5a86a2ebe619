"""`penstock status` while Redis is away: it says so, since when, and goes on when Redis is back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from console.inspect.find_run import Target
from console.inspect.status import pictures, render
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.brokers.broker import RUN, serving
from tests.helpers.stores.redis_server import RedisProcess


def screen(picture: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(picture))  # type: ignore[arg-type]
    return captured.get()


async def test_a_redis_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.inspect.status.WATCH_EVERY_S", 0.05)
    redis = RedisProcess(tmp_path, is_persistent=True)
    redis.start()
    store = RedisStore.from_url(redis.url)
    try:
        async with serving(store) as broker:
            await broker.open()
            watched = pictures(Target(run_id=RUN, broker=f"127.0.0.1:{broker.server.port}", folder=None))
            assert "run run-1 (open)" in screen(await asyncio.to_thread(next, watched))
            redis.kill()
            away = await asyncio.to_thread(next, watched)
            assert "Redis is away" in screen(away)
            still = await asyncio.to_thread(next, watched)
            assert still.problem_for_s > away.problem_for_s
            redis.start()
            async with asyncio.timeout(15):
                while (picture := await asyncio.to_thread(next, watched)).run is None:
                    pass
            assert "run run-1 (open)" in screen(picture)
    finally:
        await store.close()
        redis.kill()
