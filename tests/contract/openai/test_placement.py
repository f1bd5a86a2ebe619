"""Several endpoints of one run: an agent may call any of them, and the sessions of a task reach one."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from pydantic import ValidationError

from services.broker.storage.memory_store import MemoryStore
from services.generator.config import OpenAIConfig
from tests.helpers.brokers.broker import Generator, serving
from tests.helpers.generators.openai_endpoint import LIMITS, endpoint_bench, save_chat_model
from tests.helpers.ports import free_addresses
from tests.helpers.waiting import until

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"))


@asynccontextmanager
async def heard(broker, generator_id):
    """The broker hears a generator of that name, inside the block."""
    generator = Generator.connect(broker.channel, generator_id)

    async def beat():
        while True:
            generator.beat()
            await asyncio.sleep(1.0)

    beating = asyncio.create_task(beat())
    try:
        await generator.idle_reason()
        yield
    finally:
        beating.cancel()
        generator.stream.call.cancel()


async def fleet(stack, model, count):
    peers = free_addresses(count)
    broker = await stack.enter_async_context(serving(MemoryStore()))
    await broker.open(**(LIMITS | {"groups_per_step": 64}))
    benches = []
    for number, peer in enumerate(peers):
        each = {"listen": peer, "peers": peers, "shared_broker": broker, "generator_id": f"gen-{number}"}
        inner = AsyncExitStack()
        await inner.enter_async_context(heard(broker, each["generator_id"]))
        benches.append((await inner.enter_async_context(endpoint_bench(model, lambda _p: "ok", **each)), inner))
        stack.push_async_callback(inner.aclose)
    return benches


async def turn(bench, session, task, messages=HELLO, **more):
    client = bench.client(session, task)
    return await client.chat.completions.create(model="tiny", messages=messages, **more)


async def test_sessions_of_a_task_reach_one_generator_whichever_is_called_and_move_on_when_it_is_gone(model):
    async with AsyncExitStack() as stack:
        benches = await fleet(stack, model, 3)
        fronts = [bench for bench, _ in benches]
        places = {}
        for number in range(12):
            task = f"task{number}"
            for index, front in enumerate(fronts):
                await turn(front, f"{task}-{index}", task)
                # Its second turn, by another one, continues the first.
                again = [*HELLO, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
                stream = await turn(fronts[index - 1], f"{task}-{index}", task, again, stream=True)
                chunks = [part async for part in stream]
                assert chunks[-1].choices[0].finish_reason == "stop"
            counts = [len(bench.engine.requests) for bench in fronts]
            places[task] = counts
        pairs = [(places[f"task{number - 1}"], places[f"task{number}"]) for number in range(1, 12)]
        steps = [[now - before for before, now in zip(*pair, strict=True)] for pair in pairs]
        assert all(sorted(step) == [0, 0, 6] for step in steps), steps
        assert len({step.index(6) for step in steps}) > 1

        # The reward names no task; the session is found wherever it is.
        for number in range(12):
            states = [await each.client().get(f"/sessions/task{number}-0", cast_to=object) for each in fronts]
            assert [state["turns"] for state in states] == [2, 2, 2]
        await fronts[0].reward("task3-0", 1.0)
        with pytest.raises(Exception, match="no session"):
            await fronts[1].client().get("/sessions/never", cast_to=object)

        owner = steps[4].index(6)
        gone, inner = benches[owner]
        await inner.aclose()
        left = [bench for bench in fronts if bench is not gone]
        before = [len(bench.engine.requests) for bench in left]
        for front in left:
            await turn(front, "task5-9", "task5")
        after = [len(bench.engine.requests) for bench in left]
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, 2]


async def test_new_tasks_go_elsewhere_while_a_generator_has_more_than_its_share(model):
    async with AsyncExitStack() as stack:
        benches = await fleet(stack, model, 2)
        fronts = [bench for bench, _ in benches]
        for bench in fronts:
            bench.engine.may_answer.clear()
        waiting = [asyncio.create_task(turn(fronts[0], f"s{number}", f"t{number}")) for number in range(12)]
        await until(lambda: sum(bench.engine.num_running for bench in fronts) == 12)
        held = Counter({index: bench.engine.num_running for index, bench in enumerate(fronts)})
        for bench in fronts:
            bench.engine.may_answer.set()
        await asyncio.gather(*waiting)
    # 1.25 times the mean of 6, rounded up.
    assert max(held.values()) <= 8


def test_a_list_of_peers_without_the_endpoint_itself_is_refused():
    with pytest.raises(ValidationError, match=r"do not hold this endpoint, 127\.0\.0\.1:9"):
        OpenAIConfig(listen="127.0.0.1:9", peers=("127.0.0.1:1", "127.0.0.1:2"))
