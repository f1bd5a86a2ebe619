"""What a generator may be leased: what it said, whatever comes between a decision and its sending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from penstock.v1 import broker_pb2, types_pb2
from services.broker.operations.leasing import Grant
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams.lease_stream import LeaseStream
from tests.helpers.brokers.broker import RUN, RunningBroker, prompt, serving

CREDIT = 4
BEAT = broker_pb2.StreamLeasesRequest(beat=broker_pb2.GeneratorBeat(credit_total=CREDIT))


@pytest.fixture
async def broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        await running.open()
        yield running


async def lease_stream(broker: RunningBroker) -> LeaseStream:
    """Of a generator that has said what it may get; its other half is not served."""
    hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id="gen-1", max_context_tokens=128)
    stream = LeaseStream(broker.run_registry, broker_pb2.StreamLeasesRequest(hello=hello))
    await stream._on_request(BEAT)
    return stream


async def test_no_lease_is_given_twice_while_work_is_stolen(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await lease_stream(broker)
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def steal(*_: Any) -> list[Grant]:
        has_begun.set()
        await may_end.wait()
        return []

    monkeypatch.setattr(stream, "_take_over", steal)
    leasing = asyncio.create_task(stream._leases())
    await has_begun.wait()
    await stream._on_request(BEAT)
    seat = broker.run_registry.replica(RUN).lease_rounds.seats["gen-1"]
    assert seat.num_free == 0
    may_end.set()
    assert await leasing == []
    assert seat.num_free == CREDIT


async def test_a_lease_whose_prompt_is_gone_costs_no_credit(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.submit(prompt("a"))
    stream, replica = await lease_stream(broker), broker.run_registry.replica(RUN)

    async def gone(_group_ids: Sequence[str]) -> dict[str, types_pb2.Prompt]:
        return {}

    monkeypatch.setattr(replica.payloads, "prompts", gone)
    assert await stream._leases() == []
    assert replica.copy is not None
    assert replica.copy.generation_leases["gen-1"]
    await stream._on_request(BEAT)
    assert replica.lease_rounds.seats["gen-1"].num_free == CREDIT


async def test_a_generator_that_left_was_not_left_without_work(broker: RunningBroker) -> None:
    await lease_stream(broker)
    replica = broker.run_registry.replica(RUN)
    replica.dispatcher.note("gen-1", is_left=True, now_s=0.0)
    assert replica.dispatcher.is_overdue("gen-1", 1e6)
    replica.lease_rounds.leave(replica.lease_rounds.seats["gen-1"])
    assert not replica.dispatcher.is_overdue("gen-1", 1e6)
