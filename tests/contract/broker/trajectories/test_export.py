"""ExportTrajectories: retained steps, those to come, rewinds, and what is no longer there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.clients.trajectories import TrajectorySession
from penstock.errors import InvalidFieldError, NotRetainedError, ServiceUnavailableError, from_rpc_error
from penstock.v1 import broker_pb2
from services.broker.storage.memory_store import MemoryStore
from services.broker.streams import export_stream
from tests.helpers.brokers.broker import RUN, TIMEOUT_S, Generator, RunningBroker, Trainer, Worker, prompt, serving
from tests.helpers.brokers.steps import ack_step, train_step
from tests.helpers.brokers.trajectories import groups

_Step = tuple[int, int, tuple[str, ...]]
"""Policy version, history, group ids."""


@pytest.fixture
async def broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        await running.open(max_staleness=4)
        yield running


@pytest.fixture
async def forgetful() -> AsyncIterator[RunningBroker]:
    """A broker whose run keeps the payload of one step only."""
    async with serving(MemoryStore()) as running:
        await running.open(policy=broker_pb2.RunPolicy(num_retained_steps=1))
        yield running


class _Follower:
    """An export stream, read step by step."""

    def __init__(self, broker: RunningBroker, *, follow: bool = True, **request: Any) -> None:
        message = broker_pb2.ExportTrajectoriesRequest(run_id=RUN, follow=follow, **request)
        self._call = broker.stub.ExportTrajectories(message, timeout=60)

    async def read(self) -> Any:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, peer="broker") from error

    async def step(self) -> _Step:
        """The next whole step: its groups, then the sign of life that ends it."""
        names: list[str] = []
        while True:
            response = await self.read()
            assert response is not grpc.aio.EOF, "the stream ended"
            if response.HasField("group"):
                names.append(response.group.prompt.group_id)
                version = response.policy_version
            elif names:
                assert response.policy_version == version
                return version, response.history, tuple(names)


async def test_a_follower_gets_each_step_once_and_ends_with_the_run(broker: RunningBroker) -> None:
    await train_step(broker, "b", "a")
    follower = _Follower(broker)
    assert await follower.step() == (1, 0, ("b", "a"))
    await train_step(broker, "c", "d", version=1)
    assert await follower.step() == (2, 0, ("c", "d"))
    await broker.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN))
    while (response := await follower.read()) is not grpc.aio.EOF:
        assert not response.HasField("group")


async def test_texts_are_exported_but_not_sent_to_trainers(broker: RunningBroker) -> None:
    await train_step(broker, "a", "b")
    response = await _Follower(broker, follow=False).read()
    assert [trajectory.text for trajectory in response.group.trajectories] == ["2", "2"]
    assert (await broker.open(version=0, max_staleness=4)).num_groups_rewound == 2
    groups = await Trainer.connect(broker.channel, "again").groups(2)
    assert {trajectory.text for group in groups for trajectory in group.trajectories} == {""}


async def test_a_follower_that_waits_hears_that_the_broker_lives(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_stream, "SIGN_OF_LIFE_S", 0.05)
    follower = _Follower(broker)
    for _ in range(3):
        response = await follower.read()
        assert (response.HasField("group"), response.policy_version) == (False, 0)


async def test_steps_trained_again_after_a_rewind_are_sent_again(broker: RunningBroker) -> None:
    await train_step(broker, "a", "b")
    await train_step(broker, "c", "d", version=1)
    follower = _Follower(broker, from_policy_version=1)
    assert [await follower.step(), await follower.step()] == [(1, 0, ("a", "b")), (2, 0, ("c", "d"))]
    assert (await broker.open(version=1, max_staleness=4)).num_groups_rewound == 2
    assert set(await ack_step(Trainer.connect(broker.channel, "again"), 2, version=1)) == {"c", "d"}
    assert await follower.step() == (2, 1, ("c", "d"))


async def test_a_client_that_missed_a_rewind_gets_the_steps_made_void(broker: RunningBroker) -> None:
    for version, names in enumerate((("a", "b"), ("c", "d"), ("e", "f"))):
        await train_step(broker, *names, version=version, weights=0)
    assert (await broker.open(version=1, max_staleness=4)).num_groups_rewound == 4
    trainer = Trainer.connect(broker.channel, "again")
    for version in (1, 2):
        await ack_step(trainer, 2, version=version)
    missed = _Follower(broker, from_policy_version=4, history=0)
    assert [(await missed.step())[:2] for _ in range(2)] == [(2, 1), (3, 1)]
    heard = _Follower(broker, from_policy_version=3, history=1)
    assert (await heard.step())[:2] == (3, 1)


async def test_a_step_no_longer_retained_is_an_error_and_not_a_gap(forgetful: RunningBroker) -> None:
    broker = forgetful
    await train_step(broker, "a", "b")
    await train_step(broker, "c", "d", version=1)
    with pytest.raises(NotRetainedError, match=r"step 1 .* is 2") as refused:
        await _Follower(broker, from_policy_version=1).read()
    assert refused.value.metadata["oldest_policy_version"] == "2"
    assert await _Follower(broker, from_policy_version=2).step() == (2, 0, ("c", "d"))
    assert await _Follower(broker).step() == (2, 0, ("c", "d"))


async def test_a_follower_that_falls_behind_is_reported(
    forgetful: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = forgetful
    monkeypatch.setattr(export_stream, "MAX_BATCH_RECORDS", 1)
    await train_step(broker, "a", "b")
    loaded, resume = asyncio.Event(), asyncio.Event()
    load_records = export_stream.load_records

    async def slowly(*arguments: Any, **options: Any) -> Any:
        if loaded.is_set():
            await resume.wait()
        loaded.set()
        return await load_records(*arguments, **options)

    monkeypatch.setattr(export_stream, "load_records", slowly)
    follower = _Follower(broker)
    assert (await follower.read()).group.prompt.group_id == "a"
    await train_step(broker, "c", "d", version=1)
    resume.set()
    with pytest.raises(NotRetainedError, match="step 1"):
        await follower.step()


async def test_a_draining_broker_sends_its_followers_elsewhere(broker: RunningBroker) -> None:
    await train_step(broker, "a", "b")
    follower = _Follower(broker)
    await follower.step()
    await broker.run_registry.stop()
    with pytest.raises(ServiceUnavailableError):
        await follower.step()


async def test_a_negative_version_is_refused(broker: RunningBroker) -> None:
    with pytest.raises(InvalidFieldError, match="from_policy_version: -1"):
        await _Follower(broker, from_policy_version=-1).read()


@pytest.mark.slow
async def test_payload_that_is_lost_is_counted_at_the_end_of_its_step(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train_step(broker, "a", "b")
    load_records = export_stream.load_records

    async def without_the_first(*arguments: Any, **options: Any) -> Any:
        groups, packed = await load_records(*arguments, **options)
        return {name: group for name, group in groups.items() if name != "a"}, packed

    monkeypatch.setattr(export_stream, "load_records", without_the_first)
    follower = _Follower(broker, follow=False)
    assert (await follower.read()).group.prompt.group_id == "b"
    end = await follower.read()
    assert (end.HasField("group"), end.policy_version, end.num_missing_samples) == (False, 1, 2)
    assert await follower.read() is grpc.aio.EOF


async def test_groups_that_were_put_are_exported_with_the_others(broker: RunningBroker) -> None:
    await broker.submit(prompt("a"))
    generator, worker, trainer = (kind.connect(broker.channel) for kind in (Generator, Worker, Trainer))
    generator.beat(credits=2)
    await generator.finish(await generator.leases(2))
    await worker.score(2)
    made = groups("b", "c", "d")
    async with TrajectorySession(broker.connection, run_id=RUN, producer_id="p") as session:
        await session.store(made, max_groups=2)
    await ack_step(trainer, 2, version=0)
    await ack_step(trainer, 2, version=1)
    follower = _Follower(broker, follow=False)
    responses = [await follower.read() for _ in range(4)]
    assert await follower.read() is grpc.aio.EOF
    assert sorted(response.group.prompt.group_id for response in responses) == ["a", "b", "c", "d"]
    assert [response.policy_version for response in responses] == [1, 1, 2, 2]
    for response in responses:
        if response.group.prompt.group_id != "a":
            assert response.group in made


async def test_a_client_that_stops_reading_is_not_read_ahead_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    load_records = export_stream.load_records

    async def counting(*arguments: Any, **options: Any) -> Any:
        found = await load_records(*arguments, **options)
        loaded.append(sum(map(len, found[1].values())))
        return found

    monkeypatch.setattr(export_stream, "load_records", counting)
    async with serving(MemoryStore()) as running:
        await running.open(groups_per_step=48, max_completion_tokens=50_000, max_queued_groups=100)
        names = [f"g{number}" for number in range(48)]
        async with TrajectorySession(running.connection, run_id=RUN, producer_id="p") as session:
            await session.store(groups(*names, num_tokens=50_000), max_groups=2)
        await ack_step(Trainer.connect(running.channel), 48, version=0)
        follower = _Follower(running)
        assert (await follower.read()).HasField("group")
        # Each of these takes longer than a step of the export; it goes no further than the connection's buffers take.
        for _ in range(50):
            await running.audit()
        in_buffers, total = sum(loaded), 48 * 2 * 50_000 * 8
        assert in_buffers < total / 3
        assert len((await follower.step())[2]) == 47
        assert sum(loaded) > total


async def test_a_few_groups_of_each_step_are_sent_if_only_those_are_wanted(broker: RunningBroker) -> None:
    await train_step(broker, "a", "b")
    await train_step(broker, "c", "d", version=1)
    follower = _Follower(broker, max_groups_per_step=1)
    assert [await follower.step(), await follower.step()] == [(1, 0, ("a",)), (2, 0, ("c",))]
    assert (await broker.open(version=1, max_staleness=4)).num_groups_rewound == 2
    trained = await ack_step(Trainer.connect(broker.channel, "again"), 2, version=1)
    assert await follower.step() == (2, 1, (min(trained),))
