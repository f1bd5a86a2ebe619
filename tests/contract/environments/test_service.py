"""EnvironmentService over the SDK's classes, on real gRPC: what is idempotent, bounded and named."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from prometheus_client import REGISTRY

from penstock.environments import Action, Environment, Message, Opening, Outcome, Task, UnplayableError
from penstock.environments.serving import EnvironmentServicer, environment_service
from penstock.errors import InvalidFieldError, QueueFullError, TurnConflictError, UnknownSessionError
from penstock.network.rpc import call, open_channel
from penstock.v1 import environment_pb2, environment_pb2_grpc, types_pb2
from tests.helpers.serving import serving
from tests.helpers.waiting import until

OK, FAILED = types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_FAILED


class Echo(Environment):
    """Counts to the number in `answer`, a point a turn."""

    instances = 0
    closed = 0
    version = "3"
    tools = ({"type": "function", "function": {"name": "noop"}},)

    def reset(self, task: Task) -> Opening | None:
        if not task.answer:
            raise UnplayableError("no answer")
        Echo.instances += 1
        self.num_turns = int(task.answer)
        return None

    def step(self, action: Action) -> Outcome:
        if action.text == "raise":
            raise RuntimeError("boom")
        if action.text == "huge":
            return Outcome(messages=[Message(role="user", content="x" * 10_000_000)])
        if action.text == "assistant":
            return Outcome(messages=[Message(role="assistant", content="x")])
        if action.text == "silent":
            return Outcome()
        if action.text == "infinite":
            return Outcome(reward=float("inf"), is_done=True)
        is_done = action.turn + 1 >= self.num_turns
        return Outcome(messages=[Message(role="user", content=action.text)], reward=1.0, is_done=is_done)

    def close(self) -> None:
        Echo.closed += 1


class Slow(Environment):
    """Works until it is released."""

    release = threading.Event()
    steps = 0

    async def reset(self, task: Task) -> None:
        return None

    def step(self, action: Action) -> Outcome:
        Slow.steps += 1
        Slow.release.wait(30)
        return Outcome(reward=1.0, is_done=True)


@asynccontextmanager
async def served(factory, **options):
    servicer = EnvironmentServicer(factory, **options)
    async with serving(environment_service(servicer)) as (_, target), open_channel(target) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        yield servicer, stub
        await servicer.close()


def reset(stub, name="s", *, answer="2", timeout_s=10.0, **fields):
    request = environment_pb2.ResetRequest(session_id=name, answer=answer, **fields)
    return call(stub.Reset, request, peer="environment", timeout_s=timeout_s)


def step(stub, turn, text, name="s", *, timeout_s=10.0):
    request = environment_pb2.StepRequest(session_id=name, turn=turn, text=text)
    return call(stub.Step, request, peer="environment", timeout_s=timeout_s)


async def test_calls_are_answered_once_and_repeated_ones_as_before():
    before = Echo.instances
    async with served(Echo) as (servicer, stub):
        await reset(stub)
        first = await step(stub, 0, "one")
        again = await asyncio.gather(*(step(stub, 0, "one") for _ in range(3)))
        await reset(stub)
        last = await step(stub, 1, "two")

        assert all(answer == first for answer in again)
        assert [message.content for message in first.messages] == ["one"]
        assert (first.done, first.reward, last.done, len(last.messages)) == (False, 1.0, True, 0)
        assert Echo.instances == before + 1
        for turn, text in ((0, "other"), (3, "too far"), (2, "after the end")):
            with pytest.raises(TurnConflictError):
                await step(stub, turn, text)
        await call(stub.Close, environment_pb2.CloseRequest(session_id="s"), peer="environment")
        await until(lambda: servicer.num_sessions == 0)
        with pytest.raises(UnknownSessionError):
            await step(stub, 1, "two")


def counted(call_, outcome):
    labels = {"call": call_, "outcome": outcome}
    return REGISTRY.get_sample_value("penstock_environment_calls_total", labels) or 0


async def test_unusable_answers_are_named_counted_and_never_scored():
    refused, failed = counted("reset", "refused"), counted("step", "failed")
    open_before = REGISTRY.get_sample_value("penstock_environment_sessions") or 0
    async with served(Echo) as (_, stub):
        for text, problem in (
            ("raise", "boom"),
            ("huge", "at most 1048576"),
            ("assistant", "must be one of user, tool, system"),
            ("silent", "must say something"),
            ("infinite", "finite"),
        ):
            await reset(stub, text)
            answer = await step(stub, 0, text, text)
            assert (answer.status, answer.done, answer.HasField("reward")) == (FAILED, True, False)
            assert problem in answer.message
        with pytest.raises(InvalidFieldError, match="no answer"):
            await reset(stub, "unplayable", answer="")
        assert (counted("reset", "refused") - refused, counted("step", "failed") - failed) == (1, 5)
        assert (REGISTRY.get_sample_value("penstock_environment_sessions") or 0) - open_before == 5
        with pytest.raises(InvalidFieldError, match="session_id"):
            await reset(stub, "")


async def test_a_caller_that_gives_up_does_not_disturb_the_turn():
    Slow.release.clear()
    before = Slow.steps
    async with served(Slow) as (_, stub):
        await reset(stub)
        with pytest.raises(Exception, match="Deadline"):
            await step(stub, 0, "go", timeout_s=0.2)
        Slow.release.set()
        answer = await step(stub, 0, "go")
        assert (answer.done, answer.reward, Slow.steps - before) == (True, 1.0, 1)


async def test_sessions_are_bounded_and_idle_ones_closed():
    closed = Echo.closed
    async with served(Echo, max_sessions=2, max_idle_s=0.2) as (servicer, stub):
        await reset(stub, "a")
        await reset(stub, "b")
        with pytest.raises(QueueFullError):
            await reset(stub, "c")

        async def takes_another():
            try:
                await reset(stub, "c")
            except QueueFullError:
                return False
            return True

        async with asyncio.timeout(10):
            while not await takes_another():  # noqa: ASYNC110 -- the condition is no event
                await asyncio.sleep(0.02)
        assert servicer.num_sessions <= 2
        closing = asyncio.create_task(servicer.close_idle())
        await until(lambda: Echo.closed - closed == 3)
        closing.cancel()
        assert servicer.num_sessions == 0


async def test_it_describes_itself():
    async with served(Echo, max_sessions=7) as (_, stub):
        said = await call(stub.GetEnvironment, environment_pb2.GetEnvironmentRequest(), peer="environment")
    assert (said.name, said.version, said.max_sessions, said.opens) == ("Echo", "3", 7, False)
    assert "noop" in said.tools_json
