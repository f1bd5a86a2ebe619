"""A run over real gRPC, on every store: all the way through, its books, its view and its end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.errors import (
    RunClosedError,
)
from penstock.v1 import broker_pb2, types_pb2
from services.broker.records.store import Store
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    error_of,
    eventually,
    prompt,
    result,
    serving,
)
from tests.helpers.brokers.steps import train_step

STOP = types_pb2.FINISH_REASON_STOP


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
    assert list(scoring[0].loss_mask_runs) == [2, 1]
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
    assert isinstance(await error_of(Generator.connect(broker.channel).stream), RunClosedError)
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
