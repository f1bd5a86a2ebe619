"""How the rounds of `penstock bench placement` ask two generators, which only count here."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.placement.rounds import Round, Serving, Way, Workload, play
from services.generator.engine.engine import EngineStats

WORKLOAD = Workload(num_sessions=6, num_at_once=3, prompt_tokens=8, turn_tokens=2, given_tokens=3, longest_wait_s=0.0)


@dataclass
class Counter:
    """Answers every turn with two tokens, and says that half of each prompt was cached."""

    asked: list[tuple[str | None, list[int]]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["sampling_params"]["max_tokens"] == WORKLOAD.turn_tokens
        self.asked.append((request.headers.get("X-Session-ID"), body["token_ids"]))
        return web.json_response({"choices": [{"token_ids": [1, 2]}]})

    def stats(self) -> EngineStats:
        count = sum(len(tokens) for _, tokens in self.asked)
        return EngineStats(
            num_running=0,
            num_waiting=0,
            kv_cache_usage=0.0,
            num_preemptions=0,
            tokens_generated=0,
            tokens_sampled=0,
            prompt_tokens=count,
            cached_tokens=count // 2,
        )


async def played(way: Way) -> tuple[list[Counter], Round]:
    counters = [Counter(), Counter()]
    async with AsyncExitStack() as stack:
        generators = []
        for counter in counters:
            app = web.Application()
            app.router.add_post("/inference/v1/generate", counter.answer)
            server = await stack.enter_async_context(TestServer(app))
            generators.append(Serving(address=f"127.0.0.1:{server.port}", engine=counter))
        return counters, await play(generators, WORKLOAD, way, seed=3)


@pytest.mark.parametrize("way", list(Way))
async def test_each_turn_continues_its_session_and_both_generators_are_asked(way: Way) -> None:
    counters, measured = await played(way)
    asked = [each for counter in counters for each in counter.asked]
    assert len(asked) == WORKLOAD.num_sessions * WORKLOAD.num_turns
    assert sorted({len(tokens) for _, tokens in asked}) == [8, 13, 18, 23]
    beginnings = [tuple(tokens[:8]) for _, tokens in asked]
    assert len(set(beginnings)) == WORKLOAD.num_sessions
    assert all(counter.asked for counter in counters)
    assert measured.cached_share == pytest.approx(0.5, abs=0.01)
    assert 0.5 <= measured.busier_share < 1
    # Only the header says where a session is.
    names = {name for name, _ in asked}
    assert (None in names) == (way is Way.LOAD)
    assert len(names) == (WORKLOAD.num_sessions if way is Way.SESSION else 1)
