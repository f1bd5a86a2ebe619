"""A generator whose samples talk with an environment: scripted broker and engine, a real environment server."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from penstock.environments import Action, Environment, Message, Outcome, Task
from penstock.environments.serving import EnvironmentServicer, environment_service
from penstock.network.rpc import Server
from penstock.v1 import types_pb2
from penstock.wire.score_rules import ENVIRONMENT_WAIT_S
from services.generator.engine.engine import FinishReason
from services.generator.environments.config import EnvironmentConfig
from tests.helpers.brokers.scripted_generation import prompt
from tests.helpers.generators.generator_bench import Bench
from tests.helpers.generators.scripted_engine import ScriptedEngine, span
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow
STOP_TOKEN = 2
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


class Plus(Environment):
    """Answers with the ids it was shown, each plus 100; done after three turns. A point a turn."""

    name = "plus"
    log: list[tuple[str, int, str]] = []  # noqa: RUF012 -- the test's
    shift = 100
    is_broken = False
    hold: asyncio.Event | None = None

    def reset(self, task: Task) -> None:
        self.session_id = task.session_id
        self.num_turns = 0

    async def step(self, action: Action) -> Outcome:
        Plus.log.append((self.session_id, action.turn, action.text))
        if Plus.hold is not None:
            await Plus.hold.wait()
        if Plus.is_broken:
            raise ConnectionError("the store is away")
        self.num_turns += 1
        assert self.num_turns == action.turn + 1
        words = [str(int(word) + Plus.shift) for word in action.text.split()]
        return Outcome(
            messages=[Message(role="user", content=" ".join(words))],
            reward=float(action.turn + 1),
            is_done=action.turn == 2,
            components={"turns": 1.0},
        )


class EnvironmentServer:
    """A server that can be killed and started again, without its sessions, on the same port."""

    def __init__(self):
        self.port = 0

    async def start(self):
        self.servicer = EnvironmentServicer(Plus, max_sessions=64)
        self._server = Server(listen=f"127.0.0.1:{self.port}", services=[environment_service(self.servicer)])
        self.port = await self._server.start()

    async def kill(self):
        await self._server.stop(grace_s=0)
        await self.servicer.close()


@pytest.fixture
async def bench(tmp_path):
    Plus.log, Plus.shift, Plus.hold, Plus.is_broken = [], 100, None, False
    made = Bench(tmp_path)
    made.environment = EnvironmentServer()
    await made.environment.start()
    async with made.store.serving_content():
        yield made
    await made.environment.kill()


@asynccontextmanager
async def running(bench, engine, *, max_concurrent_samples=8, **limits):
    config = EnvironmentConfig(target=f"grpc://127.0.0.1:{bench.environment.port}", **limits)
    await bench.store.publish(0)
    async with bench.running(engine, environment=config, max_concurrent_samples=max_concurrent_samples):
        yield


def submit(bench, group_id="g", **changes):
    [sample] = bench.broker.submit(prompt(group_id, stop_token_ids=[STOP_TOKEN], **{"max_new_tokens": 40} | changes))
    return sample


async def turn(engine, sample, number, *token_ids, finish=FinishReason.STOP, lease=1):
    """The model's next turn; returns the engine's request for it."""
    name = f"{sample.prompt.group_id}-0-{lease}:{number}"
    await until(lambda: name in engine.requests, timeout_s=40)
    engine.say(name, span(*token_ids, finish=finish))
    return engine.requests[name]


async def test_turns_alternate_with_answers_that_are_masked(bench):
    engine = ScriptedEngine()
    async with running(bench, engine):
        sample = submit(bench)
        await turn(engine, sample, 0, 10, 11, STOP_TOKEN)
        request = await turn(engine, sample, 1, 12, STOP_TOKEN)
        await turn(engine, sample, 2, 13, STOP_TOKEN)
        await until(lambda: sample.is_finished)
        await until(lambda: bench.environment.servicer.num_sessions == 0)
    assert sample.token_ids == [10, 11, 2, 110, 111, 102, 12, 2, 112, 102, 13, 2]
    assert list(sample.loss_mask) == [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert request.prompt_token_ids == (5, 6, 7, 10, 11, 2, 110, 111, 102)
    assert request.sampling.max_new_tokens == 40 - 6
    assert [sample.logprobs[at] for at in (0, 3)] == [-0.5, 0.0]
    assert (sample.finish_reason, sample.score.status, sample.score.value) == (STOP, types_pb2.SCORE_STATUS_OK, 6.0)
    assert np.frombuffer(sample.score.turn_values, "<f4").tolist() == [1.0, 2.0, 3.0]
    assert (sample.score.model, dict(sample.score.components)) == ("plus", {"turns": 3.0})
    waited_s = float(sample.score.details[ENVIRONMENT_WAIT_S])
    assert waited_s > 0
    view = bench.generator.view()
    assert (view.num_environment_sessions, view.total_environment_wait_s) == (1, pytest.approx(waited_s, abs=1e-3))
    assert [text for _session, _turn, text in Plus.log] == ["10 11 2", "12 2", "13 2"]


async def test_a_session_survives_its_generator_and_its_environment(bench):
    engine = ScriptedEngine()
    async with running(bench, engine):
        sample = submit(bench)
        await turn(engine, sample, 0, 10, STOP_TOKEN)
        await turn(engine, sample, 1, 11, finish=None)
        await until(lambda: sample.token_ids[-1:] == [11])
    # Killed within its second turn: the lease expires. The environment still has the session.
    bench.broker.queue.append(sample)
    assert (sample.token_ids, list(sample.loss_mask)) == ([10, 2, 110, 102, 11], [1, 1, 0, 0, 1])
    engine = ScriptedEngine()
    async with running(bench, engine):
        name = "g-0-2:1"
        await until(lambda: name in engine.requests)
        assert engine.requests[name].prefix_token_ids == (11,)
        assert len(Plus.log) == 1
        Plus.hold = asyncio.Event()
        engine.say(name, span(STOP_TOKEN, finish=FinishReason.STOP))
        await until(lambda: len(Plus.log) == 2)
        # The worker dies in the middle of a turn, and comes back without any session.
        await bench.environment.kill()
        Plus.hold.set()
        Plus.hold = None
        await until(lambda: "waiting for environment" in bench.broker.beats[-1].warning, timeout_s=40)
        await bench.environment.start()
        await turn(engine, sample, 2, 13, STOP_TOKEN, lease=2)
        await until(lambda: sample.is_finished)
    assert sample.token_ids == [10, 2, 110, 102, 11, 2, 111, 102, 13, 2]
    assert (sample.score.value, sample.num_leases) == (6.0, 2)
    assert {session for session, _turn, _text in Plus.log} == {Plus.log[0][0]}


async def test_an_answer_that_differs_on_replay_is_never_scored(bench):
    engine = ScriptedEngine()
    async with running(bench, engine):
        sample = submit(bench)
        await turn(engine, sample, 0, 10, STOP_TOKEN)
        await until(lambda: "g-0-1:1" in engine.requests)
        Plus.shift = 200
        await bench.environment.kill()
        await bench.environment.start()
        await turn(engine, sample, 1, 11, STOP_TOKEN)
        await until(lambda: sample.is_finished)
    assert sample.score.status == types_pb2.SCORE_STATUS_ENVIRONMENT_DIVERGED
    assert not sample.score.HasField("value")


async def test_an_environment_sees_a_turn_only_once_the_broker_has_its_tokens(bench):
    engine = ScriptedEngine()
    async with running(bench, engine):
        sample = submit(bench)
        bench.broker.is_acknowledging = False
        await turn(engine, sample, 0, 10, STOP_TOKEN)
        await until(lambda: bench.broker.is_withholding)
        await until(lambda: engine.num_running == 0)
        # What must not come is no condition to wait for.
        await asyncio.sleep(0.1)
        assert Plus.log == []
        bench.broker.is_acknowledging = True
        await until(lambda: len(Plus.log) == 1)


async def test_samples_that_wait_take_no_slot_of_the_engine(bench):
    engine = ScriptedEngine()
    Plus.hold = asyncio.Event()
    async with running(bench, engine, max_concurrent_samples=1, max_waiting=2):
        samples = [submit(bench, f"g{number}") for number in range(4)]
        for sample in samples[:2]:
            await turn(engine, sample, 0, 10, STOP_TOKEN)
        await until(lambda: len(Plus.log) == 2 and "g2-0-1:0" in engine.requests)
        # Two wait and one is decoded; the fourth is not even leased.
        assert (engine.most_running, bench.broker.num_out) == (1, 3)
        hello = bench.broker.hellos[0]
        assert (hello.profile.max_concurrent_samples, hello.has_environment) == (3, True)
        Plus.hold.set()
        await turn(engine, samples[2], 0, 10, STOP_TOKEN)
        await turn(engine, samples[0], 1, 11, STOP_TOKEN)
        await until(lambda: len(Plus.log) >= 4)
        assert engine.most_running == 1


async def test_a_session_is_bounded_in_turns_tokens_and_time(bench):
    engine = ScriptedEngine()
    async with running(bench, engine, max_turns=1, step_timeout_s=0.3):
        few = submit(bench, "few")
        await turn(engine, few, 0, 10, STOP_TOKEN)
        await until(lambda: few.is_finished)
        cut = submit(bench, "cut", max_new_tokens=2)
        await turn(engine, cut, 0, 10, 11, finish=FinishReason.LENGTH)
        await until(lambda: cut.is_finished)
        Plus.hold = asyncio.Event()
        late = submit(bench, "late")
        await turn(engine, late, 0, 10, STOP_TOKEN)
        await until(lambda: late.is_finished)
        Plus.hold.set()
    assert (few.finish_reason, few.score.value, few.token_ids) == (STOP, 1.0, [10, 2])
    assert (cut.finish_reason, cut.score.value) == (LENGTH, 1.0)
    assert (late.score.status, late.score.HasField("value")) == (types_pb2.SCORE_STATUS_TIMEOUT, False)
    assert "step_timeout_s" in late.score.message


async def test_samples_wait_by_name_for_an_environment_that_answers_with_errors(bench):
    engine = ScriptedEngine()
    async with running(bench, engine, max_concurrent_samples=24, max_retries=20):
        samples = [submit(bench, f"g{number}") for number in range(20)]
        for sample in samples:
            await turn(engine, sample, 0, 10, STOP_TOKEN)
        await until(lambda: len([name for name in engine.requests if name.endswith(":1")]) == 20, timeout_s=40)
        Plus.is_broken = True
        for sample in samples:
            await turn(engine, sample, 1, 11, STOP_TOKEN)
        await until(lambda: "raised ConnectionError" in bench.broker.beats[-1].warning, timeout_s=40)
        assert "waiting for environment" in bench.broker.beats[-1].warning
        assert "FAILED for" in bench.broker.beats[-1].warning
        assert not any(sample.is_finished for sample in samples)
        Plus.is_broken = False
        for sample in samples:
            await turn(engine, sample, 2, 13, STOP_TOKEN)
        await until(lambda: all(sample.is_finished for sample in samples), timeout_s=40)
        await until(lambda: not bench.broker.beats[-1].warning)
    assert {(sample.score.value, sample.num_leases) for sample in samples} == {(6.0, 1)}
