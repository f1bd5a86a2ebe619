"""One channel over several servers: which one is asked, and what moves a client on to the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from penstock.clients.streams import Reconnecting
from penstock.errors import DeadlineError, InvalidFieldError, PenstockError, ServiceUnavailableError
from penstock.network.failover import FailoverChannel
from penstock.network.rpc import Server, Service, call, call_with_retry, open_channel, service_of
from penstock.security import Security
from penstock.v1 import broker_pb2, broker_pb2_grpc
from tests.helpers.ports import free_port
from tests.helpers.serving import serving
from tests.helpers.waiting import until


class Named(broker_pb2_grpc.BrokerServiceServicer):
    """Answers with its name, or with an error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: PenstockError | None = None
        self.is_hanging = False
        self.num_calls = 0

    @property
    def service(self) -> Service:
        return service_of(self)

    async def ListRuns(self, request: Any, context: Any) -> broker_pb2.ListRunsResponse:
        self.num_calls += 1
        if self.is_hanging:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return broker_pb2.ListRunsResponse(run_ids=[self.name])

    async def WatchPolicy(self, request: Any, context: Any) -> AsyncIterator[broker_pb2.WatchPolicyResponse]:
        yield broker_pb2.WatchPolicyResponse(policy_version=len(self.name))
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


class Pair:
    """Two servers and a client of both."""

    def __init__(self, first: Named, second: Named, servers: list[Server], channel: Any) -> None:
        self.first, self.second, self.servers = first, second, servers
        self.channel: FailoverChannel = channel
        self.stub = broker_pb2_grpc.BrokerServiceStub(channel)

    async def ask(self, *, timeout_s: float = 5.0) -> str:
        response = await call(self.stub.ListRuns, broker_pb2.ListRunsRequest(), peer="broker", timeout_s=timeout_s)
        return str(response.run_ids[0])

    async def ask_patiently(self) -> str:
        request = broker_pb2.ListRunsRequest()
        response = await call_with_retry(self.stub.ListRuns, request, peer="broker", give_up_after_s=10.0)
        return str(response.run_ids[0])

    async def moved_to(self, index: int) -> None:
        await until(lambda: self.channel.target.endswith(str(self.servers[index].port)))


@asynccontextmanager
async def pair(security: Security) -> AsyncIterator[Pair]:
    named = Named("first"), Named("second")
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(serving(one.service, security=security)) for one in named]
        channel = await stack.enter_async_context(open_channel(",".join(target for _, target in running), security))
        yield Pair(*named, [server for server, _ in running], channel)


@pytest.fixture(params=["plain", "token"])
async def both(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """With a token gRPC wraps every call, which must not hide how it ended."""
    async with pair(Security(token="t" if request.param == "token" else None, allows_plain=True)) as running:
        yield running


async def test_calls_go_to_the_first_server_as_long_as_it_works(both: Pair) -> None:
    assert {await both.ask() for _ in range(5)} == {"first"}
    both.first.error = InvalidFieldError("run_id: not yours to fail over from")
    with pytest.raises(InvalidFieldError):
        await both.ask()
    both.first.error = None
    assert await both.ask() == "first"
    assert both.second.num_calls == 0


async def test_a_server_that_stops_is_left_for_good(both: Pair) -> None:
    assert await both.ask() == "first"
    await both.servers[0].stop(grace_s=0)
    assert await both.ask_patiently() == "second"
    again = Server(listen=f"127.0.0.1:{both.servers[0].port}", services=[both.first.service])
    await again.start()
    try:
        assert {await both.ask() for _ in range(5)} == {"second"}
    finally:
        await again.stop(grace_s=0)


async def test_a_server_that_is_unavailable_itself_is_left(both: Pair) -> None:
    both.first.error = ServiceUnavailableError("Redis is away")
    with pytest.raises(ServiceUnavailableError):
        await both.ask()
    await both.moved_to(1)
    both.second.error, both.first.error = both.first.error, None
    assert await both.ask_patiently() == "first"


async def test_a_server_that_hangs_is_left_at_the_deadline(both: Pair) -> None:
    both.first.is_hanging = True
    with pytest.raises(DeadlineError):
        await both.ask(timeout_s=0.2)
    await both.moved_to(1)
    assert await both.ask() == "second"


async def test_a_stream_that_ends_as_unavailable_moves_the_client_on(both: Pair) -> None:
    both.first.error = ServiceUnavailableError("the broker drains: reconnect")
    stream: Any = both.stub.WatchPolicy(broker_pb2.WatchPolicyRequest(run_id="r"))
    assert (await stream.read()).policy_version == len("first")
    with pytest.raises(grpc.aio.AioRpcError):
        await stream.read()
    await both.moved_to(1)
    stream = both.stub.WatchPolicy(broker_pb2.WatchPolicyRequest(run_id="r"))
    assert (await stream.read()).policy_version == len("second")
    stream.cancel()


async def test_a_stream_that_falls_silent_moves_the_client_on_once(both: Pair) -> None:
    """Its client gives it up, so that it ends as cancelled, which is no fault of a server's."""
    request = broker_pb2.WatchPolicyRequest(run_id="r")

    async def follow() -> None:
        stream, heard = Reconnecting("broker"), list[int]()
        call_: Any = both.stub.WatchPolicy(request)
        with pytest.raises(ServiceUnavailableError, match="silent"):
            await stream.listen(call_, lambda response: heard.append(response.policy_version), max_silence_s=0.3)
        assert heard == [len("first")]

    stream: Any = both.stub.WatchPolicy(request)
    stream.cancel()
    await asyncio.gather(follow(), follow())
    await both.moved_to(1)
    stream = both.stub.WatchPolicy(request)
    assert (await stream.read()).policy_version == len("second")
    stream.cancel()


async def test_many_calls_that_fail_together_move_the_client_on_once(both: Pair) -> None:
    both.first.error = ServiceUnavailableError("away")
    answers = await asyncio.gather(*(both.ask() for _ in range(20)), return_exceptions=True)
    assert all(isinstance(answer, ServiceUnavailableError) for answer in answers)
    await both.moved_to(1)
    assert {await both.ask() for _ in range(5)} == {"second"}


async def test_when_no_server_answers_the_caller_hears_so_in_time() -> None:
    async with open_channel(f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}") as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        with pytest.raises(ServiceUnavailableError):
            await call_with_retry(stub.ListRuns, broker_pb2.ListRunsRequest(), peer="broker", give_up_after_s=0.5)


@pytest.mark.parametrize("targets", ["", "a:1,,b:2", ",".join(["a:1"] * 17)])
def test_targets_that_are_no_list_are_refused(targets: str) -> None:
    with pytest.raises(ValueError, match="separated by commas"):
        open_channel(targets)
