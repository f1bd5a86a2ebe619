"""A broker to test against, and small clients that play generator, reward worker and trainer by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry

from penstock.clock import Clock, SystemClock
from penstock.errors import PenstockError, from_rpc_error
from penstock.network import rpc
from penstock.network.connection import Connection
from penstock.security import NO_SECURITY, Security
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from services.broker.brokers.joining import JoinedBrokers
from services.broker.records.store import Store
from services.broker.runtime.run_registry import RunRegistry
from services.broker.server import make_run_registry, make_server
from tests.helpers.ports import free_address

RUN = "run-1"
TIMEOUT_S = 15.0
_T = TypeVar("_T")


def limits(**changes: Any) -> broker_pb2.RunLimits:
    """Two groups a step, two samples a group, no staleness."""
    values: dict[str, Any] = {
        "groups_per_step": 2,
        "group_size": 2,
        "max_staleness": 0,
        "max_completion_tokens": 64,
    }
    return broker_pb2.RunLimits(**(values | changes))


def duration(seconds: float) -> Duration:
    """Seconds as a message."""
    return Duration(nanos=round(seconds * 1e9) % 10**9, seconds=int(seconds))


def prompt(group_id: str, **changes: Any) -> types_pb2.Prompt:
    """A short training prompt."""
    values: dict[str, Any] = {
        "group_id": group_id,
        "token_ids": int32_bytes([1, 2, 3]),
        "group_size": 2,
        "sampling": types_pb2.SamplingParams(max_new_tokens=16, temperature=1.0),
        "text": "1+1=",
        "answer": "2",
        "purpose": types_pb2.PURPOSE_TRAIN,
    }
    return types_pb2.Prompt(**(values | changes))


def evaluation(group_id: str, **changes: Any) -> types_pb2.Prompt:
    """A short evaluation prompt."""
    return prompt(group_id, **({"purpose": types_pb2.PURPOSE_EVALUATE, "group_size": 1} | changes))


def chunk(
    lease: broker_pb2.Lease,
    tokens: Iterable[int],
    *,
    version: int = 0,
    offset: int = 0,
    finish: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED,
    **changes: Any,
) -> types_pb2.TokenChunk:
    """Tokens of a leased sample."""
    ids = list(tokens)
    values: dict[str, Any] = {
        "key": lease.key,
        "lease_id": lease.lease_id,
        "offset": offset,
        "token_ids": int32_bytes(ids),
        "logprobs": float32_bytes([-0.5] * len(ids)),
        "policy_versions": encode_versions([version] * len(ids)),
        "finish_reason": finish,
        "text": "2" if finish else "",
        "token_shard": lease.token_shard,
    }
    return types_pb2.TokenChunk(**(values | changes))


class Duplex:
    """A bidirectional stream driven by hand."""

    def __init__(self, method: Callable[..., Any], *first: Any, lasts_s: float | None = 60.0) -> None:
        """`lasts_s` is the call's deadline; without one, responses are waited for as long as it takes."""
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._patience_s = None if lasts_s is None else TIMEOUT_S
        for request in first:
            self._outbox.put_nowait(request)
        self.call = method(self._requests(), timeout=lasts_s)

    async def _requests(self) -> AsyncIterator[Any]:
        while (request := await self._outbox.get()) is not None:
            yield request

    def send(self, request: Any) -> None:
        """Queue a request."""
        self._outbox.put_nowait(request)

    def done_writing(self) -> None:
        """Send no more."""
        self._outbox.put_nowait(None)

    async def receive(self) -> Any:
        """The next response, grpc.aio.EOF at the end; raises what the server answered with."""
        async with asyncio.timeout(self._patience_s):
            return await self.call.read()

    async def expect(self, pick: Callable[[Any], _T | None]) -> _T:
        """The first response that `pick` makes something of."""
        async with asyncio.timeout(self._patience_s):
            while True:
                response = await self.call.read()
                assert response is not grpc.aio.EOF, "the stream ended"
                picked = pick(response)
                if picked:
                    return picked


@dataclass(slots=True)
class Generator:
    """A generator played by hand."""

    stub: broker_pb2_grpc.BrokerServiceStub
    stream: Duplex
    tokens: Duplex
    generator_id: str
    version: int = 0
    num_credits: int = 0
    sequence: int = 0
    run_id: str = RUN

    @classmethod
    def connect(
        cls,
        channel: grpc.aio.Channel,
        generator_id: str = "gen-1",
        *,
        run_id: str = RUN,
        max_context_tokens: int = 128,
        profile: broker_pb2.GeneratorProfile | None = None,
        accepts_lease_batches: bool = False,
        routing: types_pb2.RoutingShape | None = None,
        lasts_s: float | None = 60.0,
        replaces: str = "",
    ) -> Generator:
        """Open both streams."""
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        hello = broker_pb2.GeneratorHello(
            run_id=run_id,
            generator_id=generator_id,
            engine="test",
            max_context_tokens=max_context_tokens,
            profile=profile,
            accepts_lease_batches=accepts_lease_batches,
            routing=routing,
            replaces_generator_id=replaces,
        )
        stream = Duplex(stub.StreamLeases, broker_pb2.StreamLeasesRequest(hello=hello), lasts_s=lasts_s)
        return cls(stub, stream, Duplex(stub.StreamTokens, lasts_s=lasts_s), generator_id, run_id=run_id)

    def beat(self, *, credits: int = 0, version: int | None = None, active: Iterable[str] = (), **more: Any) -> None:
        """A heartbeat that grants further credits."""
        self.num_credits += credits
        self.version = self.version if version is None else version
        beat = broker_pb2.GeneratorBeat(
            credit_total=self.num_credits, policy_version=self.version, active_lease_ids=list(active), **more
        )
        self.stream.send(broker_pb2.StreamLeasesRequest(beat=beat))

    async def leases(self, count: int) -> list[broker_pb2.Lease]:
        """The next `count` leases."""
        return [
            await self.stream.expect(lambda response: response.lease if response.HasField("lease") else None)
            for _ in range(count)
        ]

    async def idle_reason(self) -> str:
        """The next reason for handing nothing out."""
        return await self.stream.expect(lambda response: response.idle.reason if response.HasField("idle") else None)

    async def put(
        self, *chunks: types_pb2.TokenChunk, run_id: str = "", must_pass_on: bool = False
    ) -> list[broker_pb2.ChunkError]:
        """Send chunks, wait for the answer."""
        self.sequence += 1
        self.tokens.send(
            broker_pb2.StreamTokensRequest(
                run_id=run_id or self.run_id,
                generator_id=self.generator_id,
                sequence=self.sequence,
                chunks=chunks,
                must_pass_on=must_pass_on,
            )
        )
        response = await self.tokens.receive()
        assert response.sequence == self.sequence
        return list(response.errors)

    async def finish(self, leases: Iterable[broker_pb2.Lease]) -> None:
        """Complete samples with three tokens each."""
        stop = types_pb2.FINISH_REASON_STOP
        chunks = [chunk(lease, [7, 8, 9], version=self.version, finish=stop) for lease in leases]
        assert await self.put(*chunks) == []


@dataclass(slots=True)
class Worker:
    """A reward worker played by hand."""

    stream: Duplex
    num_credits: int = 0

    @classmethod
    def connect(
        cls,
        channel: grpc.aio.Channel,
        worker_id: str = "worker-1",
        *,
        run_id: str = RUN,
        task: broker_pb2.ScoringTask.ValueType = broker_pb2.SCORING_TASK_REWARD,
        lasts_s: float | None = 60.0,
    ) -> Worker:
        """Open the stream."""
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        hello = broker_pb2.RewardHello(run_id=run_id, worker_id=worker_id, task=task)
        return cls(Duplex(stub.StreamScoring, broker_pb2.StreamScoringRequest(hello=hello), lasts_s=lasts_s))

    async def leases(self, count: int) -> list[broker_pb2.ScoringLease]:
        """The next `count` leases."""
        self.num_credits += count
        self.stream.send(broker_pb2.StreamScoringRequest(credit_total=self.num_credits))
        found: list[broker_pb2.ScoringLease] = []
        while len(found) < count:
            found += await self.stream.expect(lambda response: list(response.leases))
        return found

    async def report(self, *results: broker_pb2.ScoreResult) -> broker_pb2.StreamScoringResponse:
        """Send results, wait for the receipt."""
        self.stream.send(broker_pb2.StreamScoringRequest(results=results))
        return await self.stream.expect(
            lambda response: response if response.accepted_lease_ids or response.lost_lease_ids else None
        )

    async def score(self, count: int, value: float = 1.0) -> None:
        """Score the next `count` samples."""
        leases = await self.leases(count)
        receipt = await self.report(*(result(lease, value) for lease in leases))
        assert not receipt.lost_lease_ids


def result(
    lease: broker_pb2.ScoringLease,
    value: float | None = 1.0,
    status: types_pb2.ScoreStatus.ValueType = types_pb2.SCORE_STATUS_OK,
) -> broker_pb2.ScoreResult:
    """A score for a leased sample."""
    score = types_pb2.Score(status=status, value=value, model="test")
    return broker_pb2.ScoreResult(lease_id=lease.lease_id, key=lease.item.key, score=score)


@dataclass(slots=True)
class Trainer:
    """A trainer rank played by hand."""

    stub: broker_pb2_grpc.BrokerServiceStub
    stream: Duplex
    consumer_id: str
    num_credits: int = 0
    owner: broker_pb2.RunOwner | None = None

    @classmethod
    def connect(
        cls,
        channel: grpc.aio.Channel,
        consumer_id: str = "rank-0",
        *,
        purpose: types_pb2.Purpose.ValueType = types_pb2.PURPOSE_TRAIN,
        held: Iterable[str] = (),
        run_id: str = RUN,
        owner: broker_pb2.RunOwner | None = None,
        lasts_s: float | None = 60.0,
    ) -> Trainer:
        """Open the stream."""
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        hello = broker_pb2.TrainerHello(
            run_id=run_id,
            consumer_id=consumer_id,
            purpose=purpose,
            held_group_ids=list(held),
            max_groups=8,
            owner=owner,
        )
        stream = Duplex(stub.StreamMicrobatches, broker_pb2.StreamMicrobatchesRequest(hello=hello), lasts_s=lasts_s)
        return cls(stub, stream, consumer_id, owner=owner)

    async def groups(self, count: int) -> list[types_pb2.TrajectoryGroup]:
        """The next `count` groups."""
        self.num_credits += count
        self.stream.send(broker_pb2.StreamMicrobatchesRequest(credit_total=self.num_credits))
        found: list[types_pb2.TrajectoryGroup] = []
        while len(found) < count:
            found += await self.stream.expect(lambda response: list(response.microbatch.groups))
        return found

    async def waiting(self) -> broker_pb2.Waiting:
        """The next reason for handing nothing out."""
        return await self.stream.expect(lambda response: response.waiting if response.HasField("waiting") else None)

    async def ack(self, group_ids: Iterable[str], version: int, *, run_id: str = RUN) -> broker_pb2.AckStepResponse:
        """Acknowledge a step."""
        request = broker_pb2.AckStepRequest(
            run_id=run_id,
            consumer_id=self.consumer_id,
            group_ids=list(group_ids),
            policy_version=version,
            owner=self.owner,
        )
        return await rpc.call(self.stub.AckStep, request, peer="broker")


@dataclass(slots=True)
class RunningBroker:
    """A served broker."""

    run_registry: RunRegistry
    brokers: JoinedBrokers | None
    server: rpc.Server
    channel: grpc.aio.Channel
    stub: broker_pb2_grpc.BrokerServiceStub

    @property
    def connection(self) -> Connection:
        """What clients of it are made from."""
        return Connection(self.channel)

    async def call(self, method: str, request: Any) -> Any:
        """A unary call; raises the typed error."""
        return await rpc.call(getattr(self.stub, method), request, peer="broker", timeout_s=TIMEOUT_S)

    async def open(
        self,
        *,
        run_id: str = RUN,
        version: int = 0,
        policy: broker_pb2.RunPolicy | None = None,
        owner: broker_pb2.RunOwner | None = None,
        **changes: Any,
    ) -> broker_pb2.OpenRunResponse:
        """Open a run, or take it over; without a name if no owner is given."""
        request = broker_pb2.OpenRunRequest(
            run_id=run_id,
            limits=limits(**changes),
            policy_version=version,
            policy=policy,
            owner=owner,
            takes_over=True,
        )
        response: broker_pb2.OpenRunResponse = await self.call("OpenRun", request)
        return response

    async def submit(self, *prompts: types_pb2.Prompt, run_id: str = RUN) -> broker_pb2.SubmitPromptsResponse:
        """Submit prompts."""
        request = broker_pb2.SubmitPromptsRequest(run_id=run_id, prompts=prompts)
        response: broker_pb2.SubmitPromptsResponse = await self.call("SubmitPrompts", request)
        return response

    async def audit(self, run_id: str = RUN) -> broker_pb2.Audit:
        """The books, which must balance at every moment."""
        response = await self.call("AuditRun", broker_pb2.AuditRunRequest(run_id=run_id))
        assert response.audit.balanced, response.audit
        audit: broker_pb2.Audit = response.audit
        return audit


@asynccontextmanager
async def serving(
    store: Store,
    *,
    clock: Clock | None = None,
    listen: str = "127.0.0.1:0",
    registry: CollectorRegistry | None = None,
    scheduler: str | None = None,
    security: Security = NO_SECURITY,
    is_joined: bool = False,
) -> AsyncIterator[RunningBroker]:
    """A broker over `store`, on a free port if none is given, its caretaker running; called as itself.

    One that `is_joined` knows the other brokers of the store.
    """
    if is_joined:
        listen = free_address()
    run_registry = make_run_registry(
        store, registry=registry or CollectorRegistry(), clock=clock or SystemClock(), scheduler=scheduler
    )
    brokers = JoinedBrokers(run_registry, name=listen, address=listen, security=security) if is_joined else None
    server = make_server(run_registry, listen=listen, security=security, brokers=brokers)
    port = await server.start()
    if brokers is not None:
        await brokers.membership.answer()
    loops = [
        asyncio.create_task(run_registry.care(server.set_serving)),
        asyncio.create_task(run_registry.length_reporter.run()),
        *(asyncio.create_task(loop()) for loop in (brokers.loops if brokers is not None else ())),
    ]
    async with rpc.open_channel(f"127.0.0.1:{port}", security) as channel:
        try:
            yield RunningBroker(run_registry, brokers, server, channel, broker_pb2_grpc.BrokerServiceStub(channel))
        finally:
            await run_registry.stop()
            await server.stop(grace_s=1.0)
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)
            if brokers is not None:
                await brokers.leave()
            await run_registry.leave()
            await run_registry.length_reporter.close()
            await run_registry.forecaster.close()


async def eventually(condition: Callable[[], Any], *, timeout_s: float = 30.0) -> None:
    """Wait until an async condition holds."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 -- the condition is no event
            await asyncio.sleep(0.02)


async def error_of(stream: Duplex) -> PenstockError:
    """What ends the stream, once it ended; fails the test if that is no error."""
    try:
        while await stream.receive() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, peer="broker")
    pytest.fail("the stream ended with OK")
