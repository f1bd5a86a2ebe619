"""The calls of BrokerService over real gRPC, on every store: what they refuse, and the service around them."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.errors import (
    InvalidFieldError,
    RunConflictError,
    ServiceUnavailableError,
    UnknownRunError,
)
from penstock.v1 import broker_pb2
from services.broker.operations import drops
from services.broker.records.store import Store
from tests.helpers.brokers.broker import (
    RUN,
    Duplex,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    error_of,
    eventually,
    prompt,
    result,
    serving,
)
from tests.helpers.brokers.steps import train_step


async def test_calls_on_an_unknown_run_say_so(broker: RunningBroker) -> None:
    for method, request in (
        ("SubmitPrompts", broker_pb2.SubmitPromptsRequest(run_id="nobody", prompts=[prompt("a")])),
        ("AuditRun", broker_pb2.AuditRunRequest(run_id="nobody")),
        ("GetRun", broker_pb2.GetRunRequest(run_id="nobody")),
        ("CloseRun", broker_pb2.CloseRunRequest(run_id="nobody")),
        ("DropGroups", broker_pb2.DropGroupsRequest(run_id="nobody", group_ids=["a"], reason="r")),
        (
            "AckStep",
            broker_pb2.AckStepRequest(run_id="nobody", consumer_id="c", group_ids=["a"], policy_version=1),
        ),
    ):
        with pytest.raises(UnknownRunError):
            await broker.call(method, request)
    streams = (
        Generator.connect(broker.channel, run_id="nobody").stream,
        Worker.connect(broker.channel, run_id="nobody").stream,
        Trainer.connect(broker.channel, run_id="nobody").stream,
    )
    for stream in streams:
        assert isinstance(await error_of(stream), UnknownRunError)


async def test_malformed_requests_are_refused_and_nothing_is_stored(broker: RunningBroker) -> None:
    await broker.open()
    big = prompt("big", text="x" * (1 << 20))
    for method, request in (
        ("OpenRun", broker_pb2.OpenRunRequest(run_id="no spaces")),
        ("OpenRun", broker_pb2.OpenRunRequest(run_id="r", policy_version=-1)),
        ("SubmitPrompts", broker_pb2.SubmitPromptsRequest(run_id=RUN, prompts=[big])),
        ("SubmitPrompts", broker_pb2.SubmitPromptsRequest(run_id=RUN, prompts=[prompt("a")] * 1025)),
        ("DropGroups", broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["a"], reason="No Good")),
        ("AckStep", broker_pb2.AckStepRequest(run_id=RUN, consumer_id="c", policy_version=1)),
    ):
        with pytest.raises(InvalidFieldError):
            await broker.call(method, request)
    assert (await broker.audit()).submitted == 0
    assert list((await broker.call("ListRuns", broker_pb2.ListRunsRequest())).run_ids) == [RUN]


async def test_a_reason_too_many_is_refused(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drops, "MAX_REASONS", 1)
    await broker.open()
    await broker.submit(prompt("a"), prompt("b"), prompt("c"))

    async def drop(name: str, reason: str) -> int:
        request = broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=[name], reason=reason)
        return int((await broker.call("DropGroups", request)).num_samples)

    assert await drop("a", "poisoned") > 0
    with pytest.raises(InvalidFieldError, match=r"reason: 'bored' would be one more than the 1 reasons"):
        await drop("b", "bored")
    assert await drop("b", "poisoned") > 0
    # A run is closed for whatever reason.
    await broker.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN, drop_reason="bored"))
    assert set((await broker.audit()).dropped) == {"poisoned", "bored"}


async def test_streams_must_begin_with_their_hello(broker: RunningBroker) -> None:
    await broker.open()
    beat = broker_pb2.StreamLeasesRequest(beat=broker_pb2.GeneratorBeat())
    scoring = broker_pb2.StreamScoringRequest(credit_total=1)
    microbatches = broker_pb2.StreamMicrobatchesRequest(credit_total=1)
    unspecified = broker_pb2.StreamMicrobatchesRequest(hello=broker_pb2.TrainerHello(run_id=RUN, consumer_id="c"))
    for method, first in (
        (broker.stub.StreamLeases, beat),
        (broker.stub.StreamScoring, scoring),
        (broker.stub.StreamMicrobatches, microbatches),
        (broker.stub.StreamMicrobatches, unspecified),
    ):
        assert isinstance(await error_of(Duplex(method, first)), InvalidFieldError)


async def test_a_malformed_beat_ends_the_stream(broker: RunningBroker) -> None:
    await broker.open()
    generator = Generator.connect(broker.channel)
    generator.beat(tokens_per_second=float("nan"))
    error = await error_of(generator.stream)
    assert isinstance(error, InvalidFieldError)
    assert "tokens_per_second" in str(error)


async def test_a_malformed_score_ends_the_stream_and_is_not_stored(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    generator.beat(credits=2)
    await generator.finish(await generator.leases(2))
    [lease] = await worker.leases(1)
    worker.stream.send(broker_pb2.StreamScoringRequest(results=[result(lease, float("nan"))]))
    assert isinstance(await error_of(worker.stream), InvalidFieldError)
    assert (await broker.audit()).in_flight_by_state["scoring"] == 1


async def test_a_full_queue_says_when_to_try_again(broker: RunningBroker) -> None:
    await broker.open(max_queued_groups=1)
    response = await broker.submit(prompt("a"), prompt("b"))
    assert [(error.index, error.reason) for error in response.errors] == [(1, "QUEUE_FULL")]
    assert response.HasField("retry_delay")
    assert not (await broker.submit(prompt("a"))).HasField("retry_delay")


async def test_other_limits_are_a_conflict(broker: RunningBroker) -> None:
    await broker.open()
    with pytest.raises(RunConflictError, match=r"limits\.group_size: run 'run-1' was opened with 2, not with 4"):
        await broker.open(group_size=4)


async def test_a_draining_broker_ends_streams_with_unavailable(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open()
        generator = Generator.connect(broker.channel)
        await generator.idle_reason()
        await broker.run_registry.stop()
        for stream in (generator.stream, generator.tokens):
            assert isinstance(await error_of(stream), ServiceUnavailableError)


async def test_a_cancelled_stream_leaves_the_run_usable(broker: RunningBroker) -> None:
    await broker.open()
    for _ in range(5):
        generator = Generator.connect(broker.channel)
        generator.beat(credits=1)
        generator.stream.call.cancel()
    replica = broker.run_registry.replica(RUN)

    async def nobody_listens() -> bool:
        return replica.num_listeners == 0

    await eventually(nobody_listens)
    trainer = await train_step(broker, "a")
    assert (await trainer.ack(["a"], 1)).num_samples == 2


async def test_health_and_reflection_name_the_service(broker: RunningBroker) -> None:
    health = health_pb2_grpc.HealthStub(broker.channel)
    request = health_pb2.HealthCheckRequest(service="penstock.v1.BrokerService")

    async def is_healthy() -> bool:
        return (await health.Check(request, timeout=5)).status == health_pb2.HealthCheckResponse.SERVING

    # Once it has seen its store.
    await eventually(is_healthy)
    reflection = reflection_pb2_grpc.ServerReflectionStub(broker.channel)
    question = Duplex(reflection.ServerReflectionInfo, reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await question.receive()
    names = {service.name for service in answer.list_services_response.service}
    assert "penstock.v1.BrokerService" in names


async def test_two_brokers_on_one_store_share_a_run(store: Store) -> None:
    async with serving(store) as one, serving(store) as two:
        await one.open()
        await two.submit(prompt("a"), prompt("b"))
        generator_one = Generator.connect(one.channel, "gen-1")
        generator_two = Generator.connect(two.channel, "gen-2")
        for generator in (generator_one, generator_two):
            generator.beat(credits=2)
        for generator in (generator_one, generator_two):
            await generator.finish(await generator.leases(2))
        await Worker.connect(one.channel).score(4)
        trainer = Trainer.connect(two.channel)
        groups = await trainer.groups(2)
        await trainer.ack([group.prompt.group_id for group in groups], 1)
        for broker in (one, two):
            books = await broker.audit()
            assert (books.trained, books.in_flight) == (4, 0)
