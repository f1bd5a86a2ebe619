"""Recording a run from its broker: followed over restarts and rewinds, gone on with, exported by the command."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from console.recording.parts import parts_of
from console.recording.reader import read_samples
from console.recording.recorded_sample import RecordingError
from console.recording.step_recorder import Recording, missing_line, record, resume_point
from console.recording.writer import open_writer
from console.run.run_recorder import RunRecorder
from console.trajectories.export_recording import export_command
from penstock.clients.export import StepExport
from penstock.config import ConfigError
from penstock.errors import NotRetainedError, UnknownRunError
from penstock.network.connection import Connection
from penstock.network.rpc import open_channel
from penstock.security import NO_SECURITY
from penstock.v1 import broker_pb2
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RUN, RunningBroker, Trainer, serving
from tests.helpers.brokers.steps import ack_step, train_step
from tests.helpers.waiting import until


@pytest.fixture
async def broker() -> AsyncIterator[RunningBroker]:
    async with serving(MemoryStore()) as running:
        await running.open(max_staleness=4)
        yield running


def target_of(broker: RunningBroker) -> str:
    return f"127.0.0.1:{broker.server.port}"


def names(path: Path) -> list[tuple[int, int, str, int]]:
    return [(sample.policy_version, sample.history, *sample.position) for sample in read_samples(path)]


def whole(version: int, *groups: str, history: int = 0) -> list[tuple[int, int, str, int]]:
    return [(version, history, group, index) for group in groups for index in (0, 1)]


async def close(broker: RunningBroker) -> None:
    await broker.call("CloseRun", broker_pb2.CloseRunRequest(run_id=RUN))


@asynccontextmanager
async def recording(broker: RunningBroker, path: Path, **options: Any) -> AsyncIterator[Recording]:
    """A follower that writes to `path`; on leaving, its end is waited for, and its error raised."""
    found = Recording()
    version, history = resume_point(path, RUN)
    async with open_channel(target_of(broker)) as channel:
        export = StepExport(
            Connection(channel), run_id=RUN, follow=True, next_version=version, history=history, **options
        )
        writer = open_writer(path, is_followed=True)
        task = asyncio.create_task(record(export, writer, run_id=RUN, recording=found))
        try:
            yield found
            async with asyncio.timeout(15):
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            writer.close()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_a_run_is_recorded_while_it_trains(broker: RunningBroker, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run{suffix}"
    async with recording(broker, path) as found:
        await train_step(broker, "a", "b")
        await until(lambda: found.num_samples == 4)
        await train_step(broker, "c", "d", version=1)
        await close(broker)
    assert names(path) == whole(1, "a", "b") + whole(2, "c", "d")
    [first, *_] = read_samples(path)
    assert (first.run_id, first.prompt.text, first.trajectory.text) == (RUN, "1+1=", "2")
    assert first.trajectory.score.value == 1.0


async def test_a_rewound_run_is_recorded_as_it_went_on(broker: RunningBroker, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with recording(broker, path) as found:
        for version, groups in enumerate((("a", "b"), ("c", "d"), ("e", "f"))):
            await train_step(broker, *groups, version=version, weights=0)
        await until(lambda: found.num_samples == 12)
        assert (await broker.open(version=1, max_staleness=4)).num_groups_rewound == 4
        trained = await ack_step(Trainer.connect(broker.channel, "again"), 2, version=1)
        await until(lambda: found.num_samples == 16)
        await close(broker)
    assert names(path) == whole(1, "a", "b") + whole(2, *sorted(trained), history=1)


async def test_a_recorder_finds_the_broker_again_and_misses_nothing(tmp_path: Path) -> None:
    store, path = MemoryStore(), tmp_path / "run.jsonl"
    async with serving(store) as first:
        port = first.server.port
        await first.open(max_staleness=4)
        await train_step(first, "a", "b")
        found = Recording()
        channel = open_channel(f"127.0.0.1:{port}")
        export = StepExport(Connection(channel), run_id=RUN, follow=True)
        writer = open_writer(path, is_followed=True)
        task = asyncio.create_task(record(export, writer, run_id=RUN, recording=found))
        await until(lambda: found.num_samples == 4)
    async with serving(store, listen=f"127.0.0.1:{port}") as second:
        await train_step(second, "c", "d", version=1, weights=0)
        await close(second)
        async with asyncio.timeout(15):
            await task
    await channel.close()
    writer.close()
    assert names(path) == whole(1, "a", "b") + whole(2, "c", "d")


async def test_a_recording_is_gone_on_with_after_a_rewind_it_missed(broker: RunningBroker, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for version, groups in enumerate((("a", "b"), ("c", "d"))):
        await train_step(broker, *groups, version=version, weights=0)
    await close(broker)
    async with recording(broker, path):
        pass
    assert (await broker.open(version=0, max_staleness=4)).num_groups_rewound == 4
    trainer = Trainer.connect(broker.channel, "again")
    trained = [await ack_step(trainer, 2, version=version) for version in (0, 1)]
    await close(broker)
    async with recording(broker, path):
        pass
    assert names(path) == whole(1, *sorted(trained[0]), history=1) + whole(2, *sorted(trained[1]), history=1)


async def test_a_recording_of_another_run_is_left_alone(broker: RunningBroker, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    await train_step(broker, "a", "b")
    await close(broker)
    async with recording(broker, path):
        pass
    with pytest.raises(RecordingError, match="holds run run-1"):
        resume_point(path, "run-2")


async def test_a_gap_is_an_error(tmp_path: Path) -> None:
    async with serving(MemoryStore()) as broker:
        await broker.open(policy=broker_pb2.RunPolicy(num_retained_steps=1))
        path = tmp_path / "run.jsonl"
        await train_step(broker, "a", "b")
        await close(broker)
        async with recording(broker, path):
            pass
        await broker.open(version=1, policy=broker_pb2.RunPolicy(num_retained_steps=1))
        await train_step(broker, "c", "d", version=1)
        with pytest.raises(NotRetainedError, match="step 1"):
            async with recording(broker, path):
                pass
        assert names(path) == whole(1, "a", "b")


async def test_a_run_that_is_not_open_yet_is_waited_for_only_if_asked(broker: RunningBroker) -> None:
    async with open_channel(target_of(broker)) as channel:
        with pytest.raises(UnknownRunError):
            await anext(StepExport(Connection(channel), run_id="later", follow=True).responses())
        waiting = StepExport(Connection(channel), run_id="later", follow=True, waits_for_run=True).responses()
        first = asyncio.ensure_future(anext(waiting))
        await broker.open(run_id="later")
        async with asyncio.timeout(15):
            assert not (await first).HasField("group")
        await waiting.aclose()


def run_recorder(broker: RunningBroker, path: Path, notes: list[str]) -> RunRecorder:
    return RunRecorder(run_id=RUN, broker=target_of(broker), path=path, security=NO_SECURITY, note=notes.append)


async def test_a_run_that_is_interrupted_is_recorded_to_its_last_step(tmp_path: Path) -> None:
    path, notes = tmp_path / "run.parquet", list[str]()
    async with serving(MemoryStore()) as broker:
        recorder = run_recorder(broker, path, notes)
        recorder.start()
        await broker.open(max_staleness=4)
        await train_step(broker, "a", "b")
        await recorder.finish()
        assert names(path) == whole(1, "a", "b")
        # Resumed: the same file is gone on with.
        again = run_recorder(broker, path, notes)
        again.start()
        await train_step(broker, "c", "d", version=1, weights=0)
        await close(broker)
        await again.finish()
    assert names(path) == whole(1, "a", "b") + whole(2, "c", "d")
    assert (notes, list(recorder.closing_lines())) == ([], [f"recording: {path} (4 samples, steps 1 to 1)"])


async def test_a_run_that_ends_while_a_step_is_recorded_has_it_once(
    broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, notes = tmp_path / "run.jsonl", list[str]()
    is_writing, may_write = threading.Event(), threading.Event()

    class SlowWriter:
        def __init__(self, *args: Any, **more: Any) -> None:
            self._writer = open_writer(*args, **more)
            self.end_step, self.close = self._writer.end_step, self._writer.close

        def write(self, samples: Any) -> None:
            is_writing.set()
            assert may_write.wait(60)
            self._writer.write(samples)

    monkeypatch.setattr("console.run.run_recorder.open_writer", SlowWriter)
    recorder = run_recorder(broker, path, notes)
    recorder.start()
    await train_step(broker, "a", "b")
    await until(is_writing.is_set)
    finishing = asyncio.create_task(recorder.finish())
    await asyncio.sleep(0)
    may_write.set()
    await finishing
    assert names(path) == whole(1, "a", "b")
    assert (len(path.read_text().splitlines()), notes) == (4, [])


async def test_a_gap_in_a_runs_recording_is_reported_and_the_rest_is_recorded(tmp_path: Path) -> None:
    path, notes = tmp_path / "run.jsonl", list[str]()
    async with serving(MemoryStore()) as broker:
        policy = broker_pb2.RunPolicy(num_retained_steps=1)
        await broker.open(policy=policy)
        await train_step(broker, "a", "b")
        async with recording(broker, path) as found:
            await until(lambda: found.num_samples == 4)
            await close(broker)
        await broker.open(version=1, policy=policy)
        await train_step(broker, "c", "d", version=1)
        await train_step(broker, "e", "f", version=2)
        recorder = run_recorder(broker, path, notes)
        recorder.start()
        await until(lambda: bool(notes))
        await recorder.finish()
    assert names(path) == whole(1, "a", "b") + whole(3, "e", "f")
    assert notes == ["recording: a gap: steps 1 to 2 were forgotten before they were recorded whole"]


def test_missing_samples_are_reported_once_however_many_steps_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, worded, notes = Recording(), 0, list[str]()

    def line(version: int, num_samples: int) -> str:
        nonlocal worded
        worded += 1
        return missing_line(version, num_samples)

    monkeypatch.setattr("console.run.run_recorder.missing_line", line)
    recorder = RunRecorder(run_id=RUN, broker="b:1", path=tmp_path, security=NO_SECURITY, note=notes.append)
    for version in range(1, 51):
        found.missing[version] = 2
        recorder._on_step(found)

    # What a step costs does not grow with the steps before it.
    assert (worded, len(notes), len([*recorder.closing_lines()])) == (50, 50, 50)


async def test_a_recorder_that_cannot_go_on_says_so(broker: RunningBroker, tmp_path: Path) -> None:
    notes: list[str] = []
    path = tmp_path / "run.jsonl"
    path.write_text("no recording\n")
    recorder = run_recorder(broker, path, notes)
    recorder.start()
    await until(lambda: bool(notes))
    await recorder.finish()
    assert "it stopped" in notes[0]
    assert path.read_text() == "no recording\n"


def exported(broker: RunningBroker, out: Path, **changes: Any) -> Callable[[], int]:
    options: dict[str, Any] = {"follow": False, "from_version": 0, "runs_dir": out.parent}
    return lambda: export_command(RUN, out=out, broker=target_of(broker), **(options | changes))


async def test_the_command_exports_what_is_retained(
    broker: RunningBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="retains no trained step"):
        await asyncio.to_thread(exported(broker, tmp_path / "empty.parquet"))
    assert not (tmp_path / "empty.parquet").exists()
    await train_step(broker, "a", "b")
    await train_step(broker, "c", "d", version=1)
    assert await asyncio.to_thread(exported(broker, tmp_path / "all.parquet")) == 0
    assert await asyncio.to_thread(exported(broker, tmp_path / "late.jsonl", from_version=2)) == 0
    assert names(tmp_path / "all.parquet") == whole(1, "a", "b") + whole(2, "c", "d")
    assert names(tmp_path / "late.jsonl") == whole(2, "c", "d")
    assert "all.parquet: 8 samples, steps 1 to 2 of run-1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists already"):
        await asyncio.to_thread(exported(broker, tmp_path / "all.parquet"))


async def test_a_run_is_recorded_into_files_of_a_size_and_replayed_from_them(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with serving(MemoryStore()) as broker:
        await broker.open(max_staleness=4)
        recorder = RunRecorder(
            run_id=RUN,
            broker=target_of(broker),
            path=path,
            security=NO_SECURITY,
            note=lambda _text: None,
            max_bytes=1,
        )
        recorder.start()
        for version, groups in enumerate((("a", "b"), ("c", "d"), ("e", "f"))):
            await train_step(broker, *groups, version=version, weights=0)
        await close(broker)
        await recorder.finish()
    assert names(path) == whole(1, "a", "b") + whole(2, "c", "d") + whole(3, "e", "f")
    assert [part.name for part in parts_of(path)] == ["run.jsonl", "run-00002.jsonl", "run-00003.jsonl"]
    assert resume_point(path, RUN) == (3, 0)


async def test_a_run_keeps_a_few_groups_of_each_step_in_a_bounded_file(broker: RunningBroker, tmp_path: Path) -> None:
    path, notes = tmp_path / "samples.jsonl", []

    def keeper(max_bytes: int) -> RunRecorder:
        return RunRecorder(
            run_id=RUN,
            broker=target_of(broker),
            path=path,
            security=NO_SECURITY,
            note=notes.append,
            max_bytes=max_bytes,
            groups_per_step=1,
        )

    recorder = keeper(2**20)
    recorder.start()
    for version in range(3):
        await train_step(broker, f"{version}a", f"{version}b", version=version)
    await until(lambda: path.exists() and len(names(path)) == 6)
    await recorder.finish()
    assert names(path) == whole(1, "0a") + whole(2, "1a") + whole(3, "2a")
    assert (notes, list(recorder.closing_lines())) == ([], [])
    # Continued with less room: older steps go, the first and the newest stay.
    most = 2 * path.stat().st_size
    recorder = keeper(most)
    recorder.start()
    for version in range(3, 9):
        await train_step(broker, f"{version}a", f"{version}b", version=version)
    await until(lambda: names(path)[-1][0] == 9)
    await recorder.finish()
    assert path.stat().st_size <= most
    versions = sorted({version for version, *_ in names(path)})
    assert (versions[0], versions[-2:]) == (1, [8, 9])
    assert len(versions) < 9
    assert os.listdir(tmp_path) == [path.name]
