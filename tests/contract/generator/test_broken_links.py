"""Links that are reset over and over leave no task behind: the event loop's last resort hears of nothing."""

from __future__ import annotations

import asyncio
import gc

import pytest

from penstock.clients import streams
from penstock.clients.scoring import ScoringSession
from penstock.network import rpc
from penstock.network.connection import Connection
from services.reward.config import RewardModelConfig
from services.reward.models.build import build_model
from services.reward.pool import ScoringPool
from tests.helpers.brokers.scripted_generation import prompt
from tests.helpers.brokers.scripted_scoring import ScriptedBroker, scoring_item
from tests.helpers.generators.generator_bench import Bench, emulated
from tests.helpers.proxies.tcp_proxy import proxy_to
from tests.helpers.serving import serving
from tests.helpers.waiting import until

NUM_RESETS = 12
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _clients_that_come_back_soon(monkeypatch):
    """A stream that is reset before it carried a response is followed, twelve times over, by no wait of seconds."""
    monkeypatch.setattr(streams, "backoff_s", lambda **_: rpc.backoff_s(first_s=0.02, most_s=0.1))


@pytest.fixture
async def complaints():
    """What asyncio would log: exceptions that nobody retrieved, tasks destroyed while pending."""
    loop, found = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: found.append(context))
    yield found
    loop.set_exception_handler(None)


async def settle():
    """Let finalizers of what is garbage by now run."""
    for _ in range(20):
        gc.collect()
        await asyncio.sleep(0.01)


async def stop(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_reward_worker_whose_link_is_reset(complaints):
    broker = ScriptedBroker([scoring_item(number) for number in range(400)])
    async with serving(broker.service()) as (_, target), proxy_to(int(target.rpartition(":")[2])) as proxy:
        session = ScoringSession(Connection(proxy.address), run_id="r", worker_id="w", max_leases=8)
        model = build_model("exact_match")
        pool = ScoringPool(source=session, model=model, config=RewardModelConfig(max_batch_size=4))
        tasks = [asyncio.create_task(session.run()), asyncio.create_task(pool.run())]
        for _ in range(NUM_RESETS):
            num_connects = proxy.num_connects
            num_hellos = len(broker.hellos)
            proxy.cut()
            await until(
                lambda n=num_connects, h=num_hellos: proxy.num_connects > n and len(broker.hellos) > h, timeout_s=20
            )
        await stop(*tasks)
        await model.close()
    await settle()
    assert complaints == []


async def test_a_generator_whose_link_is_reset(complaints, tmp_path):
    bench = Bench(tmp_path)
    async with bench.store.serving_content():
        await bench.store.publish(0)
        for number in range(20):
            bench.broker.submit(prompt(f"g{number}"))
        async with bench.running(emulated(token_s=2e-3), through_proxy=True):
            for _ in range(NUM_RESETS):
                num_hellos = len(bench.broker.hellos)
                bench.proxy.cut()
                await until(lambda h=num_hellos: len(bench.broker.hellos) > h, timeout_s=20)
    await settle()
    assert complaints == []
