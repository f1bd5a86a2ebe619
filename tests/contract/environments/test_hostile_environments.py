"""What foreign environments may do to a sample: every one of these ends it by a name, and none becomes a number."""

from __future__ import annotations

import asyncio
import math

import pytest

from penstock.errors import InternalError, InvalidFieldError
from penstock.network.rpc import service_of
from penstock.v1 import environment_pb2, environment_pb2_grpc, types_pb2
from services.generator.engine.engine import FinishReason
from services.generator.environments.config import EnvironmentConfig
from tests.helpers.brokers.scripted_generation import prompt
from tests.helpers.generators.generator_bench import Bench
from tests.helpers.generators.scripted_engine import ScriptedEngine, span
from tests.helpers.serving import serving
from tests.helpers.waiting import until

OK, FAILED = types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_FAILED
ERROR, DIVERGED = types_pb2.SCORE_STATUS_ENVIRONMENT_ERROR, types_pb2.SCORE_STATUS_ENVIRONMENT_DIVERGED
TIMEOUT = types_pb2.SCORE_STATUS_TIMEOUT


def said(*messages, **fields):
    chat = [types_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return environment_pb2.StepResponse(messages=chat, **fields)


class Hostile(environment_pb2_grpc.EnvironmentServiceServicer):
    """Answers every turn with `answer(request)`, or with an error that this raises."""

    def __init__(self, answer):
        self.answer = answer

    async def Reset(self, request, context):
        return environment_pb2.ResetResponse()

    async def Step(self, request, context):
        found = self.answer(request)
        return await found if asyncio.iscoroutine(found) else found

    async def Close(self, request, context):
        return environment_pb2.CloseResponse()


def raising(error):
    def answer(_request):
        raise error

    return answer


async def never(_request):
    await asyncio.sleep(60)


CASES = {
    "10 MB": (lambda _request: said(("user", "1 " * 5_000_000)), FAILED, "at most 1048576"),
    "more than gRPC takes": (lambda _request: said(("user", "1" * 20_000_000)), ERROR, "larger than max"),
    "an unknown role": (lambda _request: said(("robot", "1")), FAILED, "'robot'"),
    "the model's role": (lambda _request: said(("assistant", "1")), FAILED, "'assistant'"),
    "65 messages": (lambda _request: said(*[("user", "1")] * 65), FAILED, "at most 64"),
    "nothing, and not done": (lambda _request: said(), FAILED, "must say something"),
    "no token": (lambda _request: said(("user", "")), ERROR, "no token"),
    "NaN": (lambda _request: said(done=True, reward=math.nan), FAILED, "finite"),
    "an infinite part": (lambda _request: said(done=True, reward=1, components={"x": math.inf}), FAILED, "finite"),
    "too much": (lambda _request: said(done=True, reward=1e300), ERROR, "sum"),
    "a status with a reward": (lambda _request: said(done=True, reward=1, status=FAILED, message="why"), FAILED, "why"),
    "an unknown status": (lambda _request: said(done=True, reward=1, status=99), FAILED, "status"),
    "an internal error": (raising(InternalError("broken")), ERROR, "broken"),
    "a refusal": (raising(InvalidFieldError("no such turn")), ERROR, "no such turn"),
    "silence": (never, TIMEOUT, "step_timeout_s"),
}


@pytest.fixture
async def bench(tmp_path):
    made = Bench(tmp_path)
    async with made.store.serving_content():
        yield made


async def played(bench, answer, *, num_turns=1, **limits):
    """A sample after that many turns."""
    engine = ScriptedEngine()
    await bench.store.publish(0)
    async with serving(service_of(Hostile(answer))) as (_, target):
        config = EnvironmentConfig(target=f"grpc://{target}", **limits)
        async with bench.running(engine, environment=config):
            [sample] = bench.broker.submit(prompt(stop_token_ids=[2], max_new_tokens=50))
            for number in range(num_turns):
                await until(lambda name=f"g-0-1:{number}": name in engine.requests)
                engine.say(f"g-0-1:{number}", span(10, 2, finish=FinishReason.STOP))
            await until(lambda: sample.is_finished)
    return sample


@pytest.mark.parametrize("name", CASES)
async def test_it_ends_by_a_name_and_never_with_a_number(bench, name):
    answer, status, message = CASES[name]
    sample = await played(bench, answer, step_timeout_s=0.5 if name == "silence" else 20)
    assert (sample.score.status, sample.score.HasField("value")) == (status, False)
    assert message in sample.score.message
    assert sample.token_ids == [10, 2]


async def test_one_that_is_never_done_ends_with_its_last_turn(bench):
    sample = await played(bench, lambda _request: said(("user", "7"), reward=0.5), num_turns=3, max_turns=3)
    assert (sample.score.status, sample.score.value) == (OK, 1.5)
    assert list(sample.loss_mask) == [1, 1, 0, 1, 1, 0, 1, 1]


async def test_one_that_says_more_than_fits_ends_the_sample_with_what_it_earned(bench):
    sample = await played(bench, lambda _request: said(("user", "7 " * 60), reward=0.5))
    assert (sample.finish_reason, sample.score.value, sample.token_ids) == (
        types_pb2.FINISH_REASON_LENGTH,
        0.5,
        [10, 2],
    )


async def test_one_that_rewards_nothing_leaves_the_sample_to_a_reward_model(bench):
    sample = await played(bench, lambda _request: said(done=True))
    assert (sample.finish_reason, sample.score) == (types_pb2.FINISH_REASON_STOP, None)
