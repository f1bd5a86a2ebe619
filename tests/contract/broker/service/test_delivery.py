"""What trainers and evaluations get and acknowledge over real gRPC, on every store."""

from __future__ import annotations

import pytest

from penstock.errors import (
    LeaseLostError,
    UnknownSampleError,
    VersionConflictError,
)
from penstock.v1 import broker_pb2, types_pb2
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    chunk,
    error_of,
    evaluation,
    prompt,
)
from tests.helpers.brokers.steps import train_step

STOP = types_pb2.FINISH_REASON_STOP


async def test_a_waiting_trainer_learns_why(broker: RunningBroker) -> None:
    await broker.open()
    trainer = Trainer.connect(broker.channel)
    assert "submit prompts" in (await trainer.waiting()).reason
    await broker.submit(prompt("a"))
    # One that was on its way when the prompt came still says none.
    while not (told := await trainer.waiting()).num_queued_groups:
        pass
    assert told.num_queued_groups == 1


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
    old.stream.send(broker_pb2.StreamMicrobatchesRequest(credit_total=9))
    new = Trainer.connect(broker.channel)
    await new.waiting()
    await broker.submit(prompt("a"))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    generator.beat(credits=2)
    await generator.finish(await generator.leases(2))
    await worker.score(2)
    assert isinstance(await error_of(old.stream), LeaseLostError)
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
