"""One trainer at a time, over gRPC and every store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.errors import FencedError, OtherInstanceError
from penstock.v1 import broker_pb2
from services.broker.operations.leasing import ABANDONED_WEIGHTS
from services.broker.records.store import Store
from tests.helpers.brokers.broker import (
    RUN,
    Generator,
    RunningBroker,
    Trainer,
    Worker,
    error_of,
    limits,
    prompt,
    serving,
)


@pytest.fixture
async def broker(store: Store) -> AsyncIterator[RunningBroker]:
    """A broker over each kind of store."""
    async with serving(store) as running:
        yield running


def _owner(owner_id: str, epoch: int = 0, instance_id: str = "first") -> broker_pb2.RunOwner:
    return broker_pb2.RunOwner(instance_id=instance_id, owner_id=owner_id, epoch=epoch)


async def _take_over(broker: RunningBroker, owner_id: str, *, version: int = 0) -> broker_pb2.RunOwner:
    response = await broker.open(owner=_owner(owner_id), version=version)
    return _owner(owner_id, response.epoch)


async def _make_ready(broker: RunningBroker, *names: str) -> None:
    await broker.submit(*(prompt(name) for name in names))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    generator.beat(credits=2 * len(names))
    await generator.finish(await generator.leases(2 * len(names)))
    await worker.score(2 * len(names))


async def test_every_call_of_a_trainer_is_refused_once_another_has_taken_over(broker: RunningBroker) -> None:
    old = Trainer.connect(broker.channel, owner=await _take_over(broker, "a"))
    await _make_ready(broker, "t0", "t1")
    groups = [group.prompt.group_id for group in await old.groups(2)]
    new = Trainer.connect(broker.channel, owner=await _take_over(broker, "b"))
    assert isinstance(await error_of(old.stream), FencedError)
    assert [group.prompt.group_id for group in await new.groups(2)] == groups
    again = Trainer.connect(broker.channel, owner=old.owner)
    assert isinstance(await error_of(again.stream), FencedError)
    books = await broker.audit()
    for method, request in (
        ("AckStep", broker_pb2.AckStepRequest(consumer_id="rank-0", group_ids=groups, policy_version=1)),
        ("DropGroups", broker_pb2.DropGroupsRequest(group_ids=groups, reason="unwanted")),
        ("SubmitPrompts", broker_pb2.SubmitPromptsRequest(prompts=[prompt("t2")])),
        ("CloseRun", broker_pb2.CloseRunRequest(drop_reason="run_complete")),
        ("OpenRun", broker_pb2.OpenRunRequest(limits=limits())),
    ):
        request.run_id = RUN
        request.owner.CopyFrom(old.owner)
        with pytest.raises(FencedError, match="trainer 'b' took run 'run-1' over"):
            await broker.call(method, request)
    assert await broker.audit() == books
    assert (await new.ack(groups, 1)).num_samples == 4
    run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    assert (run.owner.owner_id, run.owner.epoch, run.is_closed) == ("b", 2, False)


async def test_a_generator_hears_who_trains_and_gets_nothing_for_weights_of_another_run(broker: RunningBroker) -> None:
    first = await _take_over(broker, "a")
    await broker.submit(prompt("t0"))
    generator = Generator.connect(broker.channel)

    async def heard() -> broker_pb2.RunOwner:
        return await generator.stream.expect(lambda frame: frame.owner if frame.HasField("owner") else None)

    assert await heard() == first
    assert await _take_over(broker, "b") == await heard()
    generator.beat(credits=2, instance_id="another")
    while await generator.idle_reason() != ABANDONED_WEIGHTS:
        pass
    generator.beat(instance_id="first")
    assert len(await generator.leases(2)) == 2


async def test_another_run_under_a_used_id_is_refused(broker: RunningBroker) -> None:
    await _take_over(broker, "a")
    with pytest.raises(OtherInstanceError, match="penstock runs delete run-1"):
        await broker.open(owner=_owner("b", instance_id="second"))
