"""Generators and reward workers that say what none would, in due form: refused in words, and nothing grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from penstock.v1 import broker_pb2, types_pb2
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams import scoring_stream
from services.broker.streams.lease_stream import LeaseStream
from services.broker.streams.scoring_stream import ScoringStream
from tests.helpers.brokers.broker import RUN, Duplex, Generator, RunningBroker, prompt, serving
from tests.helpers.waiting import until

pytestmark = pytest.mark.slow

HUGE = "9" * 100


@pytest.fixture
async def broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        await running.open()
        await running.submit(prompt("a"))
        yield running


@pytest.mark.parametrize("name", ["\u00b2.0.1_1.x", "1.\u00b2.1_1.x", f"{HUGE}.0.1_1.x", f"1.{HUGE}.1_1.x", "1.0"])
async def test_a_lease_that_never_existed_is_reported_as_gone(broker: RunningBroker, name: str) -> None:
    generator = Generator.connect(broker.channel)
    generator.beat(active=[name])
    gone = await generator.stream.expect(
        lambda response: response.revocation if response.HasField("revocation") else None
    )
    assert gone.lease_id == name


async def test_a_lease_id_of_any_length_is_refused(broker: RunningBroker) -> None:
    generator = Generator.connect(broker.channel)
    generator.beat(active=["x" * 129])
    with pytest.raises(grpc.aio.AioRpcError, match="active_lease_ids") as caught:
        # What was sent before comes first.
        async for _ in generator.stream.call:
            pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("step_base_s", 5e-324, "at least 1e-12 s"),
        ("step_per_sample_s", 1e-300, "at least 1e-12 s"),
        ("step_per_sample_s", 61.0, "60.0 s"),
        ("prefill_tokens_per_second", 5e-324, "at least 0.001"),
        ("prefill_tokens_per_second", float("inf"), "finite"),
    ],
)
async def test_a_profile_that_no_generator_has_is_refused(
    broker: RunningBroker, field: str, value: float, words: str
) -> None:
    profile = broker_pb2.GeneratorProfile(**{field: value})
    stream = Generator.connect(broker.channel, profile=profile).stream
    assert await stream.call.code() == grpc.StatusCode.INVALID_ARGUMENT
    details = await stream.call.details()
    assert field in details
    assert words in details


async def test_leases_that_were_reported_are_remembered_until_the_next_report(broker: RunningBroker) -> None:
    """Otherwise a generator that reports others each time, and reads nothing, would fill the broker's memory."""
    hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id="gen-1", max_context_tokens=128)
    stream = LeaseStream(broker.run_registry, broker_pb2.StreamLeasesRequest(hello=hello))
    for number in range(3):
        beat = broker_pb2.GeneratorBeat(active_lease_ids=[f"{number}.0.1_1.x"])
        await stream._on_request(broker_pb2.StreamLeasesRequest(beat=beat))
    assert [response.revocation.lease_id for response in stream._revocations()] == ["2.0.1_1.x"]


async def test_results_of_a_worker_that_reads_no_receipts_are_not_read(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_stream, "MAX_RECEIPTS", 2)
    hello = broker_pb2.RewardHello(run_id=RUN, worker_id="w")
    stream = ScoringStream(broker.run_registry, broker_pb2.StreamScoringRequest(hello=hello))
    result = broker_pb2.ScoreResult(
        lease_id="l",
        key=types_pb2.SampleKey(group_id="a"),
        score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0),
    )
    reading = asyncio.create_task(stream._take(broker_pb2.StreamScoringRequest(results=[result] * 2)))
    await until(lambda: len(stream._receipts.lost) == 2)
    assert not reading.done()
    [receipts] = stream._take_receipts()
    assert list(receipts.lost_lease_ids) == ["l", "l"]
    await reading


async def test_a_worker_gets_the_receipts_of_any_number_of_results(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_stream, "MAX_RECEIPTS", 2)
    hello = broker_pb2.RewardHello(run_id=RUN, worker_id="w")
    stream = Duplex(broker.stub.StreamScoring, broker_pb2.StreamScoringRequest(hello=hello))
    result = broker_pb2.ScoreResult(
        lease_id="l",
        key=types_pb2.SampleKey(group_id="a"),
        score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0),
    )
    for _ in range(5):
        stream.send(broker_pb2.StreamScoringRequest(results=[result] * 3))
    num_lost = 0
    while num_lost < 15:
        num_lost += len((await stream.receive()).lost_lease_ids)
    assert num_lost == 15
