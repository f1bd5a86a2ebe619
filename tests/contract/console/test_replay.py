"""Replaying a recording to a trainer of another run: the same groups, in order, as old as they were."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.recording.reader import read_groups, read_samples
from console.recording.recorded_sample import samples_of
from console.recording.writer import open_writer
from console.trajectories.replay_recording import Replayed, ReplayOptions, replay, replay_command
from penstock.clients import BrokerClient
from penstock.config import ConfigError
from penstock.errors import DeadlineError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import decode_versions
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RunningBroker, Trainer, serving
from tests.helpers.brokers.recordings import recorded
from tests.helpers.brokers.steps import train_step
from tests.helpers.waiting import until

SECOND = "run-2"
Trained = dict[int, list[types_pb2.TrajectoryGroup]]
"""Groups in the order in which they were handed out, by the version their step made."""


@pytest.fixture
async def broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        yield running


@pytest.fixture
async def recording(broker: RunningBroker, tmp_path: Path) -> Path:
    """Three steps of two groups; those of the later two were sampled by older weights."""
    await broker.open(max_staleness=2)
    for version, names in enumerate((("b", "a"), ("c", "d"), ("f", "e"))):
        await train_step(broker, *names, version=version, weights=max(0, version - 1))
    request = broker_pb2.ExportTrajectoriesRequest(run_id="run-1")
    writer = open_writer(tmp_path / "first.jsonl")
    async for response in broker.stub.ExportTrajectories(request, timeout=10):
        writer.write(samples_of("run-1", response))
    writer.close()
    return writer.path


@asynccontextmanager
async def training(broker: RunningBroker, *, per_step: int = 2) -> AsyncIterator[Trained]:
    """A trainer of the second run that takes a step as soon as it has its groups."""
    trained: Trained = {}
    trainer = Trainer.connect(broker.channel, run_id=SECOND)

    async def train() -> None:
        version = 0
        while True:
            groups = await trainer.groups(per_step)
            version += 1
            await trainer.ack([group.prompt.group_id for group in groups], version, run_id=SECOND)
            trained[version] = groups

    task = asyncio.create_task(train())
    try:
        yield trained
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def replayed(broker: RunningBroker, file: Path, **options: Any) -> Replayed:
    result = Replayed()
    async with asyncio.timeout(20):
        await replay(BrokerClient(broker.channel), file, ReplayOptions(run_id=SECOND, **options), result=result)
    return result


async def steps(trained: Trained, count: int) -> Trained:
    await until(lambda: len(trained) >= count)
    return trained


def names(trained: Trained) -> list[list[str]]:
    return [[group.prompt.group_id for group in trained[version]] for version in sorted(trained)]


def versions_of(trajectory: types_pb2.Trajectory) -> list[int]:
    num_tokens = len(trajectory.token_ids) // 4
    found: list[int] = decode_versions(trajectory.policy_versions, num_tokens=num_tokens, field="v").tolist()
    return found


async def test_a_trainer_of_another_run_gets_the_same_groups_in_the_same_steps(
    broker: RunningBroker, recording: Path
) -> None:
    await broker.open(run_id=SECOND, max_staleness=2)
    async with training(broker) as trained:
        result = await replayed(broker, recording, prefix="")
        assert (result.num_groups, result.num_samples, result.num_refused, result.num_known) == (6, 12, 0, 0)
        await steps(trained, 3)
    assert names(trained) == [["b", "a"], ["c", "d"], ["f", "e"]]
    originals = {group.group.prompt.group_id: group.group for group in read_groups(recording)}
    for version, groups in trained.items():
        for group in groups:
            original = originals[group.prompt.group_id]
            assert group.prompt == original.prompt
            for mine, theirs in zip(group.trajectories, original.trajectories, strict=True):
                for field in ("token_ids", "behavior_logprobs", "loss_mask", "score", "text", "finish_reason"):
                    assert getattr(mine, field) == getattr(theirs, field)
                assert versions_of(mine) == versions_of(theirs) == [max(0, version - 2)] * 3
    books = await broker.audit(SECOND)
    assert (books.submitted, books.trained, dict(books.trained_by_staleness)) == (12, 12, {0: 4, 1: 8})


async def test_a_replay_begins_where_it_is_reported(broker: RunningBroker, recording: Path) -> None:
    await broker.open(run_id=SECOND, max_staleness=2)
    async with training(broker) as trained:
        assert (await replayed(broker, recording, from_version=2, from_offset=1)).num_groups == 3
        assert names(await steps(trained, 1)) == [["replay-d", "replay-f"]]
    # One group waits for a sibling of its step; the oldest versions do not exist in a run that has just begun.
    assert trained[1][0].trajectories[0].min_policy_version == 0
    assert (await broker.audit(SECOND)).in_flight == 2


async def test_samples_that_would_be_older_than_the_run_count_as_its_beginning(
    broker: RunningBroker, recording: Path
) -> None:
    await broker.open(run_id=SECOND, max_staleness=2)
    async with training(broker) as trained:
        assert (await replayed(broker, recording, from_version=3)).num_clipped == 4
        await steps(trained, 1)
    assert versions_of(trained[1][0].trajectories[0]) == [0, 0, 0]


async def test_another_step_size_is_filled_in_the_recorded_order(broker: RunningBroker, recording: Path) -> None:
    await broker.open(run_id=SECOND, max_staleness=2, groups_per_step=3)
    async with training(broker, per_step=3) as trained:
        await replayed(broker, recording, prefix="")
        await steps(trained, 2)
    assert sorted(names(trained)[0]) == ["a", "b", "c"]
    assert sorted(names(trained)[1]) == ["d", "e", "f"]


async def test_a_replay_that_is_repeated_adds_nothing(broker: RunningBroker, recording: Path) -> None:
    await broker.open(run_id=SECOND, max_staleness=2)
    async with training(broker) as trained:
        await replayed(broker, recording)
        await steps(trained, 3)
        again = await replayed(broker, recording)
    assert (again.num_samples, again.num_known) == (0, 12)
    assert (await broker.audit(SECOND)).submitted == 12


async def test_groups_too_stale_for_the_run_are_refused_and_reported(broker: RunningBroker, recording: Path) -> None:
    await broker.open(run_id=SECOND, max_staleness=0)
    async with training(broker) as trained:
        result = await replayed(broker, recording)
        await steps(trained, 1)
    assert (result.num_groups, result.num_refused) == (2, 4)
    assert "replay-c: was 1 versions old when it was trained, the run allows 0" in result.problems[0]


async def test_without_a_trainer_no_more_than_a_step_waits(broker: RunningBroker, recording: Path) -> None:
    await broker.open(run_id=SECOND, max_staleness=2)
    with pytest.raises(DeadlineError, match="stays at version 0"):
        await replayed(broker, recording, patience_s=0.3)
    assert (await broker.audit(SECOND)).in_flight == 4


async def test_samples_without_a_score_are_left_out(broker: RunningBroker, tmp_path: Path) -> None:
    failed = types_pb2.Score(status=types_pb2.SCORE_STATUS_FAILED, message="why")
    writer = open_writer(tmp_path / "rescored.jsonl")
    good, bad, alone = (recorded(name, index, version=2) for name, index in (("a", 0), ("a", 1), ("b", 0)))
    writer.write([good, bad.rescored(failed), alone.rescored(failed)])
    writer.close()
    await broker.open(run_id=SECOND, max_staleness=2)
    result = await replayed(broker, writer.path)
    assert (result.num_groups, result.num_samples, result.num_unscored, result.num_refused) == (1, 1, 2, 1)


async def test_the_command_says_what_became_of_the_recording(
    broker: RunningBroker, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await broker.open(run_id=SECOND, max_staleness=2)
    target = f"127.0.0.1:{broker.server.port}"
    async with training(broker) as trained:
        options = ReplayOptions(run_id=SECOND)
        assert await asyncio.to_thread(lambda: replay_command(recording, options, broker=target)) == 0
        await steps(trained, 3)
    assert "first.jsonl: 6 groups, 12 samples put into run-2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="run 'nobody' is not open"):
        await asyncio.to_thread(lambda: replay_command(recording, ReplayOptions(run_id="nobody"), broker=target))
    assert len(list(read_samples(recording))) == 12
