"""BrokerService over real gRPC, on every store: every call, its promises and its refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock.errors import (
    InvalidFieldError,
    LeaseLostError,
    PenstockError,
    RunClosedError,
    RunConflictError,
    ServiceUnavailableError,
    UnknownRunError,
    UnknownSampleError,
    VersionConflictError,
    from_rpc_error,
)
from penstock.v1 import broker_pb2, types_pb2
from services.broker import lease_stream, microbatch_stream, scoring_stream
from services.broker.store import Store
from tests.helpers.broker import (
    RUN,
    Duplex,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    duration,
    evaluation,
    eventually,
    prompt,
    result,
    serving,
)
from tests.helpers.steps import train_step

STOP = types_pb2.FINISH_REASON_STOP


@pytest.fixture(autouse=True)
def _talkative_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams give their signs of life ten times as often: the tests wait for several, on every store."""
    for module, name in (
        (lease_stream, "IDLE_EVERY_S"),
        (scoring_stream, "IDLE_EVERY_S"),
        (microbatch_stream, "WAITING_EVERY_S"),
    ):
        monkeypatch.setattr(module, name, 0.1)


@pytest.fixture
async def broker(store: Store) -> AsyncIterator[RunningBroker]:
    async with serving(store) as running:
        yield running


async def _error_of(stream: Duplex) -> PenstockError:
    try:
        while await stream.receive() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, peer="broker")
    pytest.fail("the stream ended with OK")


async def test_a_sample_goes_all_the_way_and_the_books_balance(broker: RunningBroker) -> None:
    await broker.open()
    response = await broker.submit(prompt("a"), prompt("b"))
    assert (len(response.errors), response.num_queued_groups) == (0, 2)
    generator, worker, trainer = (kind.connect(broker.channel) for kind in (Generator, Worker, Trainer))
    generator.beat(credits=4)
    leases = await generator.leases(4)
    assert leases[0].prompt == prompt("a")
    for lease in leases:
        assert await generator.put(chunk(lease, [7, 8])) == []
        assert await generator.put(chunk(lease, [9], offset=2, finish=STOP, loss_mask=b"\0")) == []
    assert (await broker.audit()).in_flight_by_state["finished"] == 4
    scoring = await worker.leases(4)
    item = scoring[0].item
    assert (item.prompt_text, item.answer, item.completion_text, item.run_id) == ("1+1=", "2", "2", RUN)
    receipt = await worker.report(*(result(lease, 0.25) for lease in scoring))
    assert set(receipt.accepted_lease_ids) == {lease.lease_id for lease in scoring}
    groups = await trainer.groups(2)
    trajectory = groups[0].trajectories[1]
    assert trajectory.token_ids == b"\7\0\0\0\x08\0\0\0\x09\0\0\0"
    assert (len(trajectory.behavior_logprobs), trajectory.loss_mask) == (12, b"\1\1\0")
    assert (trajectory.score.value, trajectory.finish_reason, trajectory.generator_id) == (0.25, STOP, "gen-1")
    times = (trajectory.submit_time, trajectory.lease_time, trajectory.finish_time, trajectory.score_time)
    assert sorted(time.ToMicroseconds() for time in times) == [time.ToMicroseconds() for time in times]
    receipt = await trainer.ack(["a", "b"], 1)
    assert (receipt.policy_version, receipt.num_samples, receipt.max_staleness_seen) == (1, 4, 0)
    books = await broker.audit()
    assert (books.submitted, books.trained, books.in_flight, dict(books.trained_by_staleness)) == (4, 4, 0, {0: 4})


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
        assert isinstance(await _error_of(stream), UnknownRunError)


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
        assert isinstance(await _error_of(Duplex(method, first)), InvalidFieldError)


async def test_a_malformed_beat_ends_the_stream(broker: RunningBroker) -> None:
    await broker.open()
    generator = Generator.connect(broker.channel)
    generator.beat(tokens_per_second=float("nan"))
    error = await _error_of(generator.stream)
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
    assert isinstance(await _error_of(worker.stream), InvalidFieldError)
    assert (await broker.audit()).in_flight_by_state["scoring"] == 1


async def test_never_more_leases_than_credits(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"), prompt("b"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=1)
    await generator.leases(1)
    assert "slot" in await generator.idle_reason()
    generator.beat(credits=2)
    await generator.leases(2)
    assert (await broker.audit()).in_flight_by_state["leased"] == 3


async def test_a_generator_that_gets_nothing_is_told_why(broker: RunningBroker) -> None:
    await broker.open(groups_per_step=1)
    generator = Generator.connect(broker.channel)
    assert "heartbeat" in await generator.idle_reason()
    generator.beat(credits=9)
    assert "empty" in await generator.idle_reason()
    await broker.submit(prompt("a"), prompt("b"))
    await generator.leases(2)
    assert "admission" in await generator.idle_reason()


async def test_leases_expire_and_another_generator_goes_on_from_the_last_chunk(broker: RunningBroker) -> None:
    await broker.open(generation_lease=duration(0.5))
    await broker.submit(prompt("a"))
    lost = Generator.connect(broker.channel, "gen-lost")
    lost.beat(credits=2)
    leases = await lost.leases(2)
    assert await lost.put(chunk(leases[0], [7, 8])) == []
    other = Generator.connect(broker.channel, "gen-2")
    other.beat(credits=2)
    again = {lease.key.sample_index: lease for lease in await other.leases(2)}
    assert again[0].prefix_token_ids == b"\7\0\0\0\x08\0\0\0"
    revoked = {await lost.stream.expect(lambda response: response.revocation.lease_id or None) for _ in range(2)}
    assert revoked == {lease.lease_id for lease in leases}
    assert [error.reason for error in await lost.put(chunk(leases[0], [9], offset=2))] == ["LEASE_LOST"]
    assert await other.put(chunk(again[0], [9], offset=2, finish=STOP)) == []


async def test_heartbeats_keep_leases_alive(broker: RunningBroker) -> None:
    await broker.open(generation_lease=duration(0.6))
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=2)
    kept, lost = await generator.leases(2)

    async def is_other_expired() -> bool:
        generator.beat(active=[kept.lease_id])
        return (await broker.audit()).in_flight_by_state["queued"] == 1

    await eventually(is_other_expired)
    assert await generator.put(chunk(kept, [7], finish=STOP)) == []
    assert [error.reason for error in await generator.put(chunk(lost, [7], finish=STOP))] == ["LEASE_LOST"]


async def test_a_generator_that_reconnects_keeps_its_leases(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=2)
    leases = await generator.leases(2)
    generator.stream.call.cancel()
    again = Generator.connect(broker.channel)
    again.beat(active=[lease.lease_id for lease in leases])
    assert "slot" in await again.idle_reason()
    await again.finish(leases)
    assert (await broker.audit()).in_flight_by_state["finished"] == 2


async def test_a_dropped_group_is_revoked(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=1)
    [lease] = await generator.leases(1)
    request = broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["a", "nobody"], reason="poisoned")
    assert (await broker.call("DropGroups", request)).num_samples == 2
    assert (await broker.call("DropGroups", request)).num_samples == 0
    assert await generator.stream.expect(lambda response: response.revocation.lease_id or None) == lease.lease_id
    assert [error.reason for error in await generator.put(chunk(lease, [7]))] == ["UNKNOWN_SAMPLE"]
    assert dict((await broker.audit()).dropped) == {"poisoned": 2}
    assert (await broker.submit(prompt("a"))).num_queued_groups == 0


async def test_a_full_queue_says_when_to_try_again(broker: RunningBroker) -> None:
    await broker.open(max_queued_groups=1)
    response = await broker.submit(prompt("a"), prompt("b"))
    assert [(error.index, error.reason) for error in response.errors] == [(1, "QUEUE_FULL")]
    assert response.HasField("retry_delay")
    assert not (await broker.submit(prompt("a"))).HasField("retry_delay")


async def test_scores_expire_and_go_to_another_worker(broker: RunningBroker) -> None:
    await broker.open(scoring_lease=duration(0.3))
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    generator.beat(credits=2)
    await generator.finish(await generator.leases(2))
    slow, other = Worker.connect(broker.channel, "slow"), Worker.connect(broker.channel, "other")
    late = await slow.leases(2)
    await other.score(2)
    receipt = await slow.report(*(result(lease) for lease in late))
    assert set(receipt.lost_lease_ids) == {lease.lease_id for lease in late}
    assert (await broker.audit()).in_flight_by_state["scored"] == 2


async def test_a_trainer_that_waits_is_told_why(broker: RunningBroker) -> None:
    await broker.open()
    trainer = Trainer.connect(broker.channel)
    assert "submit prompts" in (await trainer.waiting()).reason
    await broker.submit(prompt("a"))
    assert (await trainer.waiting()).num_queued_groups == 1


async def test_a_trainer_that_reconnects_gets_what_it_no_longer_holds(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"), prompt("b"))
    generator, worker, trainer = (kind.connect(broker.channel) for kind in (Generator, Worker, Trainer))
    generator.beat(credits=4)
    await generator.finish(await generator.leases(4))
    await worker.score(4)
    await trainer.groups(2)
    again = Trainer.connect(broker.channel, held=["b"])
    assert [group.prompt.group_id for group in await again.groups(1)] == ["a"]
    trainer.stream.send(broker_pb2.StreamMicrobatchesRequest(credit_total=99))
    await again.ack(["a", "b"], 1)


async def test_an_older_stream_of_a_consumer_hands_nothing_out_any_more(broker: RunningBroker) -> None:
    await broker.open()
    old = Trainer.connect(broker.channel)
    await old.waiting()
    new = Trainer.connect(broker.channel)
    await new.waiting()
    old.stream.send(broker_pb2.StreamMicrobatchesRequest(credit_total=9))
    await broker.submit(prompt("a"))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    generator.beat(credits=2)
    await generator.finish(await generator.leases(2))
    await worker.score(2)
    assert isinstance(await _error_of(old.stream), LeaseLostError)
    assert len(await new.groups(1)) == 1


async def test_evaluation_reaches_its_own_stream_and_stays_out_of_the_books(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(evaluation("e"))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    trainer = Trainer.connect(broker.channel, purpose=types_pb2.PURPOSE_EVALUATE)
    generator.beat(credits=1)
    await generator.finish(await generator.leases(1))
    await worker.score(1, 0.5)
    [group] = await trainer.groups(1)
    assert (group.prompt.group_id, group.trajectories[0].score.value) == ("e", 0.5)
    assert (await broker.audit()).submitted == 0
    request = broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["e"], reason="evaluated")
    await broker.call("DropGroups", request)
    assert dict((await broker.audit()).dropped) == {}


async def test_acknowledging_is_idempotent_and_strict(broker: RunningBroker) -> None:
    await broker.open()
    trainer = await train_step(broker, "a", "b")
    assert (await trainer.ack(["a", "b"], 1)).num_samples == 4
    with pytest.raises(VersionConflictError):
        await trainer.ack(["a"], 3)
    with pytest.raises(UnknownSampleError):
        await trainer.ack(["nobody"], 2)
    assert (await broker.audit()).policy_version == 1


async def test_a_run_rewinds_to_the_trainers_checkpoint(broker: RunningBroker) -> None:
    await broker.open()
    await train_step(broker, "a", "b")
    watch = broker.stub.WatchPolicy(broker_pb2.WatchPolicyRequest(run_id=RUN), timeout=30)
    first = await watch.read()
    assert (first.policy_version, first.history) == (1, 0)
    response = await broker.open(version=0)
    assert (response.existed, response.num_groups_rewound, response.num_groups_in_flight) == (True, 2, 2)
    second = await watch.read()
    assert (second.policy_version, second.history) == (0, 1)
    trainer = Trainer.connect(broker.channel, "rank-0-restarted")
    groups = await trainer.groups(2)
    await trainer.ack([group.prompt.group_id for group in groups], 1)
    books = await broker.audit()
    assert (books.submitted, books.trained) == (4, 4)


async def test_other_limits_are_a_conflict(broker: RunningBroker) -> None:
    await broker.open()
    with pytest.raises(RunConflictError, match=r"limits\.group_size: run 'run-1' was opened with 2, not with 4"):
        await broker.open(group_size=4)


async def test_an_audit_while_others_commit_compares_books_of_one_moment(store: Store) -> None:
    async with serving(store) as broker, serving(store) as other:
        await broker.open(max_queued_groups=1000)

        async def submit(running: RunningBroker, name: str) -> None:
            for number in range(20):
                await running.submit(prompt(f"{name}{number}"))

        async def audit() -> None:
            for _ in range(20):
                await broker.audit()

        await asyncio.gather(submit(broker, "a"), submit(other, "b"), audit())
        assert (await other.audit()).submitted == 80


async def test_closing_ends_streams_with_ok_and_keeps_the_books(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"))
    generator = Generator.connect(broker.channel)
    await generator.put()
    trainer = Trainer.connect(broker.channel)
    await trainer.waiting()
    streams = (generator.stream, generator.tokens, Worker.connect(broker.channel).stream, trainer.stream)
    worker_stream = streams[2]
    worker_stream.send(broker_pb2.StreamScoringRequest(credit_total=1))
    await worker_stream.receive()
    for _ in range(2):
        await broker.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN))
    for stream in streams:
        while await stream.receive() is not grpc.aio.EOF:
            pass
        assert await stream.call.code() == grpc.StatusCode.OK
    assert (await broker.audit()).in_flight == 2
    with pytest.raises(RunClosedError):
        await broker.submit(prompt("b"))
    assert isinstance(await _error_of(Generator.connect(broker.channel).stream), RunClosedError)
    assert (await broker.open()).existed


async def test_the_run_shows_generators_their_busy_spans_and_who_waits(broker: RunningBroker) -> None:
    await broker.open()
    await broker.submit(prompt("a"))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    span = types_pb2.TimeSpan(start_time=Timestamp(seconds=100), end_time=Timestamp(seconds=200))
    generator.beat(credits=1, num_running=1, busy_spans=[span])
    await generator.leases(1)
    worker.stream.send(broker_pb2.StreamScoringRequest(credit_total=1))

    async def get(seconds: int) -> broker_pb2.GetRunResponse:
        request = broker_pb2.GetRunRequest(run_id=RUN, busy_since=Timestamp(seconds=seconds))
        response: broker_pb2.GetRunResponse = await broker.call("GetRun", request)
        return response

    async def is_complete() -> Any:
        run = await get(150)
        return run.generators and run.generators[0].busy_spans and run.reward_worker_ids

    await eventually(is_complete)
    run = await get(150)
    [view] = run.generators
    assert (view.hello.generator_id, view.num_leases, view.beat.num_running) == ("gen-1", 1, 1)
    assert list(view.busy_spans) == [span]
    assert list(run.reward_worker_ids) == ["worker-1"]
    assert any(wait.waiter == "trainer" and wait.owner == "generator gen-1" for wait in run.waits)
    assert run.audit.balanced
    assert list((await get(250)).generators[0].busy_spans) == []


async def test_trained_groups_can_be_exported(broker: RunningBroker) -> None:
    await broker.open()
    await train_step(broker, "a", "b")
    call = broker.stub.ExportTrajectories(broker_pb2.ExportTrajectoriesRequest(run_id=RUN), timeout=10)
    exported = [response async for response in call]
    assert [(item.group.prompt.group_id, item.policy_version) for item in exported] == [("a", 1), ("b", 1)]
    assert len(exported[0].group.trajectories[0].token_ids) == 12
    later = broker_pb2.ExportTrajectoriesRequest(run_id=RUN, from_policy_version=2)
    assert [response async for response in broker.stub.ExportTrajectories(later, timeout=10)] == []


async def test_large_groups_are_split_over_messages(broker: RunningBroker) -> None:
    await broker.open(groups_per_step=3, max_completion_tokens=100_000)
    await broker.submit(*(prompt(name) for name in "abc"))
    generator, worker, trainer = (kind.connect(broker.channel) for kind in (Generator, Worker, Trainer))
    generator.beat(credits=6)
    for lease in await generator.leases(6):
        assert await generator.put(chunk(lease, [7] * 40_000, finish=STOP)) == []
    await worker.score(6)
    trainer.stream.send(broker_pb2.StreamMicrobatchesRequest(credit_total=3))
    num_groups = 0
    while num_groups < 3:
        batch = await trainer.stream.expect(
            lambda response: response.microbatch if response.HasField("microbatch") else None
        )
        assert batch.ByteSize() <= 1 << 20
        num_groups += len(batch.groups)


async def test_a_draining_broker_ends_streams_with_unavailable(store: Store) -> None:
    async with serving(store) as broker:
        await broker.open()
        generator = Generator.connect(broker.channel)
        await generator.idle_reason()
        await broker.hubs.stop()
        for stream in (generator.stream, generator.tokens):
            assert isinstance(await _error_of(stream), ServiceUnavailableError)


async def test_a_cancelled_stream_leaves_the_run_usable(broker: RunningBroker) -> None:
    await broker.open()
    for _ in range(5):
        generator = Generator.connect(broker.channel)
        generator.beat(credits=1)
        generator.stream.call.cancel()
    hub = broker.hubs.hub(RUN)

    async def nobody_listens() -> bool:
        return hub.num_listeners == 0

    await eventually(nobody_listens)
    await train_step(broker, "a")


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
