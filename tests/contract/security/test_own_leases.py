"""Generators and reward workers report their own leases alone: by certificates, and by leases nobody can guess."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import Descriptor

from penstock.errors import ForbiddenError
from penstock.network import rpc
from penstock.security import Security
from penstock.security.roles import allowed_roles, role_name
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from services.broker.rules.limits import LEASE_SECRET_BYTES
from services.broker.storage.memory_store import MemoryStore
from tests.contract.security.test_access import METHODS
from tests.helpers.brokers.broker import (
    RUN,
    Duplex,
    Generator,
    RunningBroker,
    Worker,
    chunk,
    duration,
    error_of,
    eventually,
    prompt,
    result,
    serving,
)
from tests.helpers.certificates import issue, make_authority

STOP, ABORTED = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_ABORTED
GENERATOR, REWARD, OBSERVER = (f"{role}:0123456789abcdef" for role in ("generator", "reward", "observer"))
BY_TOKENS = Security(token="the-operators", accepted_tokens=(GENERATOR, REWARD, OBSERVER), allows_plain=True)
FIRST, SECOND = "gpu-1-a", "gpu-2-a"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("authority"))


def channel_of(broker: RunningBroker, security: Security) -> grpc.aio.Channel:
    return rpc.open_channel(f"127.0.0.1:{broker.server.port}", security)


async def leased_by(broker: RunningBroker, channel: grpc.aio.Channel, generator_id: str):
    """A generator with a lease."""
    await broker.submit(prompt("g"))
    generator = Generator.connect(channel, generator_id)
    generator.beat(credits=2)
    return generator, await generator.leases(2)


async def in_state(broker: RunningBroker, state: str) -> int:
    return (await broker.audit()).in_flight_by_state[state]


async def test_a_generators_certificate_speaks_for_its_own_name_only(authority):
    first, second = (issue(authority, roles=["generator"], name=name) for name in ("gpu-1", "gpu-2"))
    async with (
        serving(MemoryStore(), security=issue(authority, name="broker")) as broker,
        channel_of(broker, first) as of_first,
        channel_of(broker, second) as of_second,
    ):
        await broker.open()
        generator, leases = await leased_by(broker, of_first, FIRST)
        stub = broker_pb2_grpc.BrokerServiceStub(of_second)
        stolen = [chunk(lease, [7, 8], finish=STOP) for lease in leases]
        hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id=FIRST, max_context_tokens=128)
        for stream in (
            Duplex(stub.StreamLeases, broker_pb2.StreamLeasesRequest(hello=hello)),
            Duplex(
                stub.StreamTokens,
                broker_pb2.StreamTokensRequest(run_id=RUN, generator_id=FIRST, sequence=1, chunks=stolen),
            ),
        ):
            error = await error_of(stream)
            assert isinstance(error, ForbiddenError)
            assert f"generator_id: '{FIRST}' is not the certificate's; it must be 'gpu-2'" in str(error)
        assert await in_state(broker, "leased") == 2
        await generator.finish(leases)
        assert await in_state(broker, "finished") == 2


@pytest.mark.parametrize("how", ["certificates", "tokens"])
async def test_a_generator_that_knows_anothers_leases_can_neither_report_nor_end_nor_renew_them(authority, how):
    server, first, second = BY_TOKENS, *(Security(token=GENERATOR, allows_plain=True),) * 2
    if how == "certificates":
        first, second = (issue(authority, roles=["generator"], name=name) for name in ("gpu-1", "gpu-2"))
        server = issue(authority, name="broker")
    async with (
        serving(MemoryStore(), security=server) as broker,
        channel_of(broker, first) as of_first,
        channel_of(broker, second) as of_second,
    ):
        await broker.open(generation_lease=duration(1.0))
        generator, leases = await leased_by(broker, of_first, FIRST)
        other = Generator.connect(of_second, SECOND)
        for finish in (STOP, ABORTED, types_pb2.FINISH_REASON_UNSPECIFIED):
            errors = await other.put(*(chunk(lease, [7, 8], finish=finish) for lease in leases))
            assert [error.reason for error in errors] == ["LEASE_LOST"] * 2
        assert await in_state(broker, "leased") == 2
        generator.stream.call.cancel()

        async def has_expired() -> bool:
            other.beat(active=[lease.lease_id for lease in leases])
            return await in_state(broker, "queued") == 2

        await eventually(has_expired)


@pytest.mark.parametrize("how", ["certificates", "tokens"])
async def test_a_score_counts_from_the_worker_that_holds_the_lease_only(authority, how):
    server, first, second = BY_TOKENS, *(Security(token=REWARD, allows_plain=True),) * 2
    if how == "certificates":
        first, second = (issue(authority, roles=["reward"], name=name) for name in ("w-1", "w-2"))
        server = issue(authority, name="broker")
    async with (
        serving(MemoryStore(), security=server) as broker,
        channel_of(broker, first) as of_first,
        channel_of(broker, second) as of_second,
    ):
        await broker.open()
        generator, leases = await leased_by(broker, broker.channel, FIRST)
        await generator.finish(leases)
        worker, other = Worker.connect(of_first, "w-1"), Worker.connect(of_second, "w-2")
        held = await worker.leases(2)
        for status in (types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_FAILED):
            value = 9.0 if status == types_pb2.SCORE_STATUS_OK else None
            receipt = await other.report(*(result(lease, value, status) for lease in held))
            assert not receipt.accepted_lease_ids
            assert sorted(receipt.lost_lease_ids) == sorted(lease.lease_id for lease in held)
        assert await in_state(broker, "scoring") == 2
        receipt = await worker.report(*(result(lease, 1.0) for lease in held))
        assert len(receipt.accepted_lease_ids) == 2
        # A repetition of what is stored is the holder's alone, too.
        assert len((await other.report(*(result(lease, 1.0) for lease in held))).lost_lease_ids) == 2
        if how == "certificates":
            error = await error_of(Worker.connect(of_second, "w-1").stream)
            assert isinstance(error, ForbiddenError)
            assert "worker_id: 'w-1' is not the certificate's" in str(error)


def lease_fields(message: Descriptor, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Fields of a message, at any depth, that name leases."""
    for field in message.fields:
        if "lease_id" in field.name:
            yield f"{message.name}.{field.name}"
        if field.message_type is not None and field.message_type.full_name not in seen:
            yield from lease_fields(field.message_type, seen | {message.full_name})


def test_leases_are_named_to_those_who_work_on_them_only():
    named = {method.name: method for _, method, _ in METHODS if any(lease_fields(method.output_type))}
    # Views of generators have their last beat, without its leases: see the test below.
    named.pop("GetRun")
    assert {name: {role_name(role) for role in allowed_roles(method)} for name, method in named.items()} == {
        # Between brokers, of which each has every lease of its runs.
        "AcceptChunks": {"broker"},
        "StreamLeases": {"generator"},
        "StreamTokens": {"generator"},
        "StreamScoring": {"reward"},
    }


async def test_no_answer_to_others_holds_a_lease(tmp_path):
    async with serving(MemoryStore(), security=BY_TOKENS) as broker:
        await broker.open()
        generator, leases = await leased_by(broker, broker.channel, FIRST)
        generator.beat(active=[lease.lease_id for lease in leases])
        await generator.finish(leases[:1])
        scoring = await Worker.connect(broker.channel).leases(1)
        secrets = [lease.lease_id.rpartition(".")[2] for lease in (*leases, *scoring)]
        assert {len(secret) for secret in secrets} == {2 * LEASE_SECRET_BYTES}
        assert len(set(secrets)) == 3
        for token in (GENERATOR, OBSERVER):
            async with channel_of(broker, Security(token=token, allows_plain=True)) as channel:
                stub = broker_pb2_grpc.BrokerServiceStub(channel)
                told = [
                    await stub.GetRun(broker_pb2.GetRunRequest(run_id=RUN)),
                    await anext(aiter(stub.WatchPolicy(broker_pb2.WatchPolicyRequest(run_id=RUN)))),
                ]
                if token == OBSERVER:
                    told += [
                        await stub.AuditRun(broker_pb2.AuditRunRequest(run_id=RUN)),
                        await stub.ListRuns(broker_pb2.ListRunsRequest()),
                    ]
            text = b"".join(answer.SerializeToString() for answer in told)
            assert told[0].generators[0].HasField("beat")
            assert FIRST.encode() in text
            assert not [secret for secret in secrets if secret.encode() in text]
        # Another that says it is the holder has to guess: nothing it is told brings it nearer.
        async with channel_of(broker, Security(token=GENERATOR, allows_plain=True)) as channel:
            liar = Generator.connect(channel, FIRST)
            guesses = [chunk(leases[1], [7]) for _ in range(3)]
            for number, guess in enumerate(guesses):
                guess.lease_id = f"{guess.lease_id.rpartition('.')[0]}.{number:016x}"
            errors = await liar.put(*guesses)
        assert [error.reason for error in errors] == ["LEASE_LOST"] * 3
        assert not any(secret in str(errors) for secret in secrets)
