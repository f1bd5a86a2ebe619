"""A Redis that lost its last moment: the audit counts what was trained, the recording says what is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from console.recording.reader import read_samples
from console.run.run_recorder import RunRecorder
from penstock.security import NO_SECURITY
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import index_mask
from tests.helpers.broker_model.process import Backing, MemoryBacking, RedisBacking
from tests.helpers.brokers.broker import RUN, Generator, RunningBroker, Trainer, Worker, limits, prompt, result, serving
from tests.helpers.stores.stores import RedisServers
from tests.helpers.waiting import until

_MAKE: dict[str, Callable[[RedisServers], Backing]] = {
    "memory": lambda _servers: MemoryBacking(),
    "redis": lambda servers: RedisBacking(servers.emptied("redis")),
}
POLICY = broker_pb2.RunPolicy(partial_groups=broker_pb2.PARTIAL_GROUP_POLICY_SHRINK)


@pytest.fixture(params=_MAKE)
def backing(request: pytest.FixtureRequest, servers: RedisServers) -> Backing:
    return _MAKE[request.param](servers)


@pytest.fixture
async def broker(backing: Backing) -> AsyncIterator[RunningBroker]:
    async with serving(backing.store) as running:
        await running.open(policy=POLICY, group_size=3)
        yield running
    await backing.store.close()


async def open_with_ledger(broker: RunningBroker, version: int, steps: list[broker_pb2.StepRecord]) -> None:
    request = broker_pb2.OpenRunRequest(
        run_id=RUN, limits=limits(group_size=3), policy=POLICY, policy_version=version, steps=steps
    )
    await broker.call("OpenRun", request)


async def lose_a_step(broker: RunningBroker, backing: Backing, tmp_path: Path) -> broker_pb2.StepRecord:
    """Step 1 trains five of six samples, one of which got no score; Redis forgets all of it, and even group b."""
    await broker.submit(prompt("a", group_size=3))
    backing.save()
    await broker.submit(prompt("b", group_size=3))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    trainer = Trainer.connect(broker.channel)
    generator.beat(credits=6)
    await generator.finish(await generator.leases(6))
    for lease in await worker.leases(6):
        is_lost = (lease.item.key.group_id, lease.item.key.sample_index) == ("a", 1)
        await worker.report(result(lease, None, types_pb2.SCORE_STATUS_FAILED) if is_lost else result(lease))
    groups = {
        group.prompt.group_id: [trajectory.key.sample_index for trajectory in group.trajectories]
        for group in await trainer.groups(2)
    }
    assert groups == {"a": [0, 2], "b": [0, 1, 2]}
    await trainer.ack(["a", "b"], 1)
    assert (await broker.audit()).trained == 5
    backing.lose()
    return broker_pb2.StepRecord(
        policy_version=1, group_ids=list(groups), trained_samples=[index_mask(indices) for indices in groups.values()]
    )


async def test_no_sample_counts_as_trained_that_was_not(
    broker: RunningBroker, backing: Backing, tmp_path: Path
) -> None:
    step = await lose_a_step(broker, backing, tmp_path)
    await open_with_ledger(broker, 1, [step])
    books = await broker.audit()
    assert (books.policy_version, books.trained, books.in_flight) == (1, 5, 0)
    assert dict(books.dropped) == {"not_trained": 1}


async def test_a_trainer_that_names_groups_only_is_believed_as_before(
    broker: RunningBroker, backing: Backing, tmp_path: Path
) -> None:
    step = await lose_a_step(broker, backing, tmp_path)
    del step.trained_samples[:]
    await open_with_ledger(broker, 1, [step])
    assert (await broker.audit()).trained == 6


async def test_the_recording_goes_on_and_says_what_is_missing(
    broker: RunningBroker, backing: Backing, tmp_path: Path
) -> None:
    step = await lose_a_step(broker, backing, tmp_path)
    await open_with_ledger(broker, 1, [step])
    notes: list[str] = []
    path = tmp_path / "trajectories.jsonl"
    target = f"127.0.0.1:{broker.server.port}"
    recorder = RunRecorder(run_id=RUN, broker=target, path=path, security=NO_SECURITY, note=notes.append)
    recorder.start()
    await until(lambda: bool(notes))
    await broker.submit(prompt("c", group_size=3), prompt("d", group_size=3))
    generator, worker = Generator.connect(broker.channel), Worker.connect(broker.channel)
    generator.beat(credits=6, version=1)
    await generator.finish(await generator.leases(6))
    await worker.score(6)
    trainer = Trainer.connect(broker.channel)
    await trainer.groups(2)
    await trainer.ack(["c", "d"], 2)
    await broker.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN))
    await recorder.finish()
    assert notes == ["recording: step 1: 5 samples are missing, Redis lost them"]
    assert [(sample.policy_version, *sample.position) for sample in read_samples(path)] == [
        (2, group, index) for group in ("c", "d") for index in range(3)
    ]
