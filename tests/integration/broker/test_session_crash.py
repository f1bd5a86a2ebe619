"""Sessions with an environment outlive a broker: they go on from the last finished turn, and nothing is dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from penstock.clients.broker import BrokerClient
from penstock.environments import Action, Environment, Message, Outcome, Task
from penstock.environments.serving import EnvironmentServicer, environment_service
from penstock.v1 import broker_pb2, types_pb2
from services.generator.engine.engine import FinishReason, GenerateRequest
from services.generator.environments.config import EnvironmentConfig
from tests.helpers.brokers.broker import duration, limits
from tests.helpers.brokers.broker_process import BrokerProcess
from tests.helpers.brokers.scripted_generation import prompt
from tests.helpers.generators.generator_bench import Bench
from tests.helpers.generators.scripted_engine import ScriptedEngine, span
from tests.helpers.serving import serving
from tests.helpers.stores.redis_server import RedisProcess
from tests.helpers.waiting import until

pytestmark = pytest.mark.timeout(180)
RUN, STOP_TOKEN, NUM_TURNS = "r", 2, 3


class Plus(Environment):
    """Answers with the ids it was shown, each plus 100; done after three turns, a point each."""

    name = "plus"
    log: list[tuple[str, int, str]] = []  # noqa: RUF012 -- the test's

    def reset(self, task: Task) -> None:
        self.session_id = task.session_id

    def step(self, action: Action) -> Outcome:
        Plus.log.append((self.session_id, action.turn, action.text))
        text = " ".join(str(int(word) + 100) for word in action.text.split())
        is_done = action.turn + 1 == NUM_TURNS
        return Outcome(messages=[Message(role="user", content=text)], reward=1.0, is_done=is_done)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    server = RedisProcess(tmp_path, is_persistent=True)
    server.start()
    process = BrokerProcess(server.url)
    yield process
    process.kill()
    server.kill()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    Plus.log = []
    made = Bench(tmp_path)
    async with made.store.serving_content():
        await made.store.publish(0)
        yield made


@asynccontextmanager
async def environment() -> AsyncIterator[EnvironmentConfig]:
    servicer = EnvironmentServicer(Plus)
    async with serving(environment_service(servicer)) as (_, target):
        yield EnvironmentConfig(target=f"grpc://{target}")
    await servicer.close()


async def requests_of(engine: ScriptedEngine, turn: int) -> dict[str, GenerateRequest]:
    """What both samples ask of the engine in that turn."""

    def found() -> dict[str, GenerateRequest]:
        return {name: each for name, each in engine.requests.items() if name.endswith(f":{turn}")}

    await until(lambda: len(found()) == 2, timeout_s=40)
    return found()


async def take_turn(engine: ScriptedEngine, turn: int) -> None:
    for name in await requests_of(engine, turn):
        engine.say(name, span(10 + turn, STOP_TOKEN, finish=FinishReason.STOP))


async def test_sessions_go_on_from_the_last_finished_turn_and_none_is_dropped(
    broker: BrokerProcess, bench: Bench
) -> None:
    """Killed first with the generator alive, then with the generator, which another one replaces."""
    await broker.start()
    async with BrokerClient(broker.address) as client, environment() as config:
        bounds = limits(groups_per_step=1, generation_lease=duration(5))
        await client.open_run(RUN, limits=bounds, policy=broker_pb2.RunPolicy(has_environment=True), policy_version=0)
        group = prompt("g", group_size=2, max_new_tokens=40, stop_token_ids=[STOP_TOKEN])
        await client.submit_prompts(RUN, [group])
        engine = ScriptedEngine()
        async with bench.running(engine, environment=config, broker=broker.address):
            await take_turn(engine, 0)
            await requests_of(engine, 1)
            broker.kill()
            await take_turn(engine, 1)
            await until(lambda: engine.num_running == 0)
            assert [turn for _session, turn, _text in Plus.log] == [0, 0], "its tokens are nowhere but here"
            await broker.start()
            for name in await requests_of(engine, 2):
                engine.say(name, span(99))
            broker.kill()
        await broker.start()
        engine = ScriptedEngine()
        async with bench.running(engine, environment=config, broker=broker.address):
            for request in (await requests_of(engine, 2)).values():
                assert request.prompt_token_ids == (5, 6, 7, 10, 2, 110, 102, 11, 2, 111, 102)
            await take_turn(engine, 2)
            await _train(client)
        books = await client.audit(RUN)
    assert (books.submitted, books.trained, books.in_flight, dict(books.dropped)) == (2, 2, 0, {})
    assert books.balanced
    # The environment saw each turn of each session once.
    assert len(Plus.log) == len({(session, turn) for session, turn, _text in Plus.log}) == 2 * NUM_TURNS


async def _train(client: BrokerClient) -> None:
    async with client.consumer(RUN, "rank-0", max_held_groups=1) as session:
        microbatch = await session.next(timeout_s=40)
        assert microbatch is not None
        for sample in microbatch.groups[0].trajectories:
            assert (sample.score.status, sample.score.value) == (types_pb2.SCORE_STATUS_OK, NUM_TURNS)
            assert sample.num_leases == 2
            tokens = np.frombuffer(sample.token_ids, "<i4").tolist()
            mask = list(sample.loss_mask)
            assert [token for token, bit in zip(tokens, mask, strict=True) if not bit] == [110, 102, 111, 102]
    await client.ack_step(RUN, consumer_id="rank-0", group_ids=["g"], policy_version=1)
