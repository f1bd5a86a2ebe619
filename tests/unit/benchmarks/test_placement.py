"""How the rounds of `penstock bench placement` ask two generators, which only count here, and who is heard."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.placement.presence import heard
from benchmarks.placement.rounds import Round, Serving, Way, Workload, play
from benchmarks.tools.rate import memory_broker
from penstock.clients.broker import BrokerClient
from penstock.clients.sessions import SessionClient
from penstock.network.connection import Connection
from penstock.v1 import broker_pb2, sessions_pb2
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


async def test_a_generator_that_is_heard_keeps_its_sessions() -> None:
    async with memory_broker() as address, BrokerClient(address) as broker, Connection(address) as connection:
        limits = broker_pb2.RunLimits(groups_per_step=1, group_size=1, max_completion_tokens=8)
        await broker.open_run("r", limits=limits, policy_version=0)
        owner, other = (
            SessionClient(address, run_id="r", generator_id=name, patience_s=10.0) for name in ("owner", "other")
        )
        session = sessions_pb2.AgentSession(session_id="s", task="t", group="g")
        async with heard(connection, run_id="r", generator_id="owner"):
            await owner.put(session, [], first_turn=0, keep_s=60.0)
            [frame] = [frame async for frame in other.take(session_id="s")]
            assert (frame.holder.generator_id, frame.holder.is_silent) == ("owner", False)
        await owner.close()
        await other.close()
