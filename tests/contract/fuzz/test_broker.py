"""Malformed and hostile requests to every call of the broker: refused with a stated code and reason, nothing stored."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from penstock.network import rpc
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import float32_bytes
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams import request_reader
from tests.helpers.broker_model.profile import IS_LONG, TIMEOUT_S
from tests.helpers.brokers.broker import RUN, Duplex, Generator, RunningBroker, chunk, prompt, serving
from tests.helpers.fuzzing.grpc_requests import Fuzzer, answer, methods
from tests.helpers.fuzzing.services import BROKER_SERVICES, broker_requests
from tests.helpers.waiting import until

METHODS = methods(*BROKER_SERVICES)
NUM_ROUNDS = 1000 if IS_LONG else 25
SEED = random.randrange(1 << 32) if IS_LONG else 20


@pytest.fixture
async def broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        await running.open()
        await running.submit(prompt("a"))
        yield running


def _mark(broker: RunningBroker) -> Any:
    store = broker.run_registry.store
    assert isinstance(store, MemoryStore)
    return {run_id: run.mark for run_id, run in store._runs.items()}


async def _is_well(broker: RunningBroker) -> None:
    books = await broker.audit()
    assert books.in_flight == 2 or books.submitted >= 2
    assert (await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))).run_id == RUN


def test_every_call_has_an_honest_request_to_damage() -> None:
    assert {method.name for method in METHODS} == broker_requests().keys()


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_nonsense_is_refused_with_a_reason_and_stores_nothing(
    broker: RunningBroker, method: MethodDescriptor
) -> None:
    print(f"seed {SEED}")
    # A deletion in due form takes the run away, and rightly so.
    known = () if method.name == "DeleteRun" else (RUN,)
    fuzzer = Fuzzer(SEED, names=(*known, "a", "g", "other"))
    valid = broker_requests()[method.name]
    for _ in range(NUM_ROUNDS):
        for request in fuzzer.requests(method, valid[:1]):
            before = _mark(broker)
            code = await answer(broker.channel, method, request)
            if code != grpc.StatusCode.OK:
                assert _mark(broker) == before, f"{method.name} refused {request!r} and stored something"
        if len(valid) > 1:
            later = fuzzer.requests(method, valid[1:])
            await answer(broker.channel, method, valid[0].SerializeToString(), *later)
    await _is_well(broker)


def _streaming() -> list[MethodDescriptor]:
    return [method for method in METHODS if method.client_streaming]


@pytest.mark.parametrize("method", _streaming(), ids=lambda method: method.name)
async def test_a_stream_without_a_word_is_ended(
    broker: RunningBroker, method: MethodDescriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "HELLO_TIMEOUT_S", 0.1)
    stream = Duplex(broker.channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}"))
    assert await stream.call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "hello" in await stream.call.details()


@pytest.mark.parametrize("name", ["StreamLeases", "StreamScoring", "StreamMicrobatches"])
async def test_a_second_hello_is_refused(broker: RunningBroker, name: str) -> None:
    hello = broker_requests()[name][0]
    stream = Duplex(getattr(broker.stub, name), hello, hello)
    async with asyncio.timeout(10.0):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            # What was sent before comes first.
            async for _ in stream.call:
                pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_oversize_message_is_refused_and_the_server_goes_on(broker: RunningBroker) -> None:
    [method] = [method for method in METHODS if method.name == "SubmitPrompts"]
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{broker.server.port}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(path)(b"\0" * (rpc.MAX_MESSAGE_BYTES + 1), timeout=20)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await _is_well(broker)


async def test_bad_chunks_of_a_lease_held_are_refused_and_the_sample_goes_on(broker: RunningBroker) -> None:
    generator = Generator.connect(broker.channel)
    generator.beat(credits=1)
    [lease] = await generator.leases(1)
    good = chunk(lease, [7, 8])
    before = _mark(broker)
    changes: list[dict[str, Any]] = [
        {"logprobs": float32_bytes([-0.5])},
        {"logprobs": float32_bytes([float("nan"), -0.5])},
        {"logprobs": float32_bytes([0.5, -0.5])},
        {"logprobs": b"\0\0\0"},
        {"token_ids": b"\0" * 7},
        {"token_ids": b"\xff" * 8},
        {"loss_mask": b"\2\1"},
        {"loss_mask": b"\1"},
        {"policy_versions": types_pb2.VersionRuns(versions=b"\0" * 8, lengths=b"\3\0\0\0")},
        {"policy_versions": types_pb2.VersionRuns(versions=b"\xff" * 8, lengths=b"\2\0\0\0")},
        {"policy_versions": types_pb2.VersionRuns(versions=b"\1" + b"\0" * 7, lengths=b"\2\0\0\0")},
        {"policy_versions": types_pb2.VersionRuns(versions=b"\0" * 16, lengths=b"\xff\xff\xff\x7f\3\0\0\x80")},
        {"finish_reason": 77},
        {"text": "early"},
        {"offset": 4_294_967_295},
    ]
    for change in changes:
        bad = types_pb2.TokenChunk()
        bad.CopyFrom(good)
        for field, value in change.items():
            if isinstance(value, Message):
                getattr(bad, field).CopyFrom(value)
            else:
                setattr(bad, field, value)
        [error] = await generator.put(bad)
        assert error.reason in ("INVALID_FIELD", "OFFSET_MISMATCH"), change
        assert error.message
    assert _mark(broker) == before
    assert await generator.put(good) == []


async def test_more_calls_than_a_process_bears_are_refused_until_idle_ones_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand silent streams cost no more memory than the cap lets them; see docs/protocol.md for the figure."""
    monkeypatch.setattr(rpc, "MAX_CONCURRENT_CALLS", 50)
    monkeypatch.setattr(request_reader, "HELLO_TIMEOUT_S", 1.0)
    async with serving(MemoryStore()) as broker:
        await broker.open()
        streams = [Duplex(broker.stub.StreamLeases) for _ in range(80)]
        codes = [await stream.call.code() for stream in streams]
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= 30
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
        await _is_well_again(broker)


async def _is_well_again(broker: RunningBroker) -> None:
    await until(lambda: broker.run_registry.replica(RUN).num_listeners == 0)
    await asyncio.sleep(0)
    assert (await broker.audit()).balanced
