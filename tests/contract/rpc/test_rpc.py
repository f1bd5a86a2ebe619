import asyncio
import os
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.errors import BadTokenError, DeadlineError, InternalError, NotOfferedError, PenstockError, QueueFullError
from penstock.network.rpc import (
    MAX_MESSAGE_BYTES,
    PortUnavailableError,
    Server,
    call,
    call_with_retry,
    open_channel,
    run_until_stopped,
    service_of,
    wait_until_serving,
)
from penstock.security import Security
from penstock.v1 import reward_pb2 as pb
from penstock.v1 import reward_pb2_grpc
from tests.helpers.serving import channel_to, serving
from tests.helpers.waiting import until

NAME = "penstock.v1.RewardService"


class Scripted(reward_pb2_grpc.RewardServiceServicer):
    """Does what it is told, once for each thing told; afterwards it answers."""

    def __init__(self, *script):
        self.script = list(script)
        self.started = asyncio.Event()

    async def Score(self, request, context):
        self.started.set()
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Exception):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
        return pb.ScoreResponse()


def service(*script):
    return service_of(Scripted(*script))


def score(channel):
    return reward_pb2_grpc.RewardServiceStub(channel).Score


async def test_an_error_reaches_the_client_as_the_class_that_was_raised():
    async with channel_to(service(QueueFullError("prompts: full", queue="prompts"))) as channel:
        with pytest.raises(QueueFullError, match="prompts: full") as caught:
            await call(score(channel), pb.ScoreRequest(), peer="reward")
    assert caught.value.metadata == {"queue": "prompts"}


async def test_an_unforeseen_error_is_internal_and_tells_no_secrets():
    async with channel_to(service(RuntimeError("password=hunter2"))) as channel:
        with pytest.raises(InternalError) as caught:
            await call(score(channel), pb.ScoreRequest(), peer="reward")
    assert "hunter2" not in str(caught.value)


async def test_a_method_left_out_is_not_offered_and_one_that_fails_is_a_fault():
    async with channel_to(service(NotImplementedError("a bug"))) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(InternalError):
            await call(stub.Score, pb.ScoreRequest(), peer="reward")
        with pytest.raises(NotOfferedError, match="GetRewardModel is not offered"):
            await call(stub.GetRewardModel, pb.GetRewardModelRequest(), peer="reward")


async def test_a_call_without_an_answer_ends_at_its_deadline():
    async with channel_to(service(asyncio.Event())) as channel:
        with pytest.raises(DeadlineError):
            await call(score(channel), pb.ScoreRequest(), peer="reward", timeout_s=0.2)


async def test_a_retryable_error_is_retried_and_another_is_not():
    async with channel_to(service(QueueFullError("full"), QueueFullError("full"))) as channel:
        answer = await call_with_retry(score(channel), pb.ScoreRequest(), peer="reward", give_up_after_s=10)
    assert answer == pb.ScoreResponse()
    async with channel_to(service(PenstockError("no"))) as channel:
        with pytest.raises(PenstockError, match="no"):
            await call_with_retry(score(channel), pb.ScoreRequest(), peer="reward", give_up_after_s=10)


async def test_health_is_per_service_and_reflection_lists_it():
    async with channel_to(service()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", NAME):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        stream = stub.ServerReflectionInfo(timeout=5)
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await stream.read()
        await stream.done_writing()
    assert NAME in {each.name for each in listed.list_services_response.service}


async def test_a_message_over_the_limit_is_refused():
    request = pb.ScoreRequest(items=[pb.ScoreItem(completion_text="x" * (MAX_MESSAGE_BYTES + 1))])
    async with channel_to(service()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await score(channel)(request, timeout=10)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_wrong_token_is_refused_and_the_right_one_passes():
    secured = Security(token="right", allows_plain=True)
    async with serving(service(), security=secured) as (_, target):
        for security in (Security(), Security(token="wrong", allows_plain=True)):
            async with open_channel(target, security) as channel:
                with pytest.raises(BadTokenError):
                    await call(score(channel), pb.ScoreRequest(), peer="reward")
        async with open_channel(target, secured) as channel:
            assert await call(score(channel), pb.ScoreRequest(), peer="reward") == pb.ScoreResponse()


async def test_a_port_in_use_is_named():
    async with serving(service()) as (_, target):
        with pytest.raises(PortUnavailableError, match=target):
            await Server(listen=target, services=[]).start()


async def test_a_signal_lets_calls_under_way_end_and_turns_health_off():
    release = asyncio.Event()
    scripted = service(release)
    server = Server(listen="127.0.0.1:0", services=[scripted])
    running = asyncio.create_task(run_until_stopped(server, grace_s=10))
    await until(lambda: server.port > 0)
    target = f"127.0.0.1:{server.port}"
    assert await wait_until_serving(target, service=NAME, timeout_s=5)
    async with open_channel(target) as channel:
        under_way = asyncio.ensure_future(score(channel)(pb.ScoreRequest(), timeout=20))
        await scripted.servicer.started.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await server.stopping.wait()
        release.set()
        assert await under_way == pb.ScoreResponse()
    await asyncio.wait_for(running, 10)
    assert not await wait_until_serving(target, timeout_s=0.3)


async def test_a_failing_loop_ends_the_server_with_its_error():
    async def broken():
        raise RuntimeError("loop broke")

    server = Server(listen="127.0.0.1:0", services=[service()])
    with pytest.raises(RuntimeError, match="loop broke"):
        await asyncio.wait_for(run_until_stopped(server, loops=[broken]), 10)
