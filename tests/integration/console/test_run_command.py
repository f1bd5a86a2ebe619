"""`penstock run` as a person meets it, with a scripted trainer and broker: follow, interrupt, lose, resume, refuse."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from console.config.run_folder import RunFolder, read_record, started_ticks_of
from console.launch.embedded_redis import redis_spec, redis_url
from console.launch.supervisor import SupervisedProcess, service_environment
from console.recording.reader import read_samples
from penstock.process.signals import FORCE_AFTER_S
from penstock.v1 import trainer_pb2
from tests.helpers.brokers.scripted_run import ScriptedRunBroker, ScriptedTrainer
from tests.helpers.console import COMMAND, document, environment, write_document
from tests.helpers.serving import serving
from tests.helpers.waiting import until

# Each starts several processes: what they share the machine with decides how long that takes.
pytestmark = pytest.mark.timeout(240)


@asynccontextmanager
async def attached(folder: Path, trainer: ScriptedTrainer, broker: ScriptedRunBroker) -> AsyncIterator[list[str]]:
    """Arguments of `penstock run` for a run in which everything runs elsewhere already."""
    async with serving(trainer.service, broker.service) as (_, target):
        value: dict[str, Any] = document(folder)
        names = ("broker", "scheduler", "reward", "trainer")
        value["endpoints"] = {**dict.fromkeys(names, target), "generators": [target]}
        yield ["run", str(write_document(folder, value))]


async def started(arguments: list[str], folder: Path) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, cwd=folder, env=environment(), stdout=pipe, stderr=pipe
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), 40.0)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def page_of(process: asyncio.subprocess.Process) -> URL:
    """The link that a run prints of its page."""
    assert process.stdout is not None
    while not (line := await asyncio.wait_for(process.stdout.readline(), 40.0)).startswith(b"page: "):
        assert line, "the output ended"
    return URL(line.decode().removeprefix("page: ").strip())


async def test_a_run_is_followed_to_its_end_and_reported(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        for _ in range(3):
            trainer.pace.release()
        status, out, err = await ended(await started(arguments, tmp_path))
    assert (status, err) == (0, "")
    assert [f"step {n}/3" in out for n in (1, 2, 3)] == [True] * 3
    assert "audit: submitted 8 = trained 8 + dropped 0 + in flight 0: balanced" in out
    run_dir = tmp_path / "runs" / "r1"
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3
    assert '"/api/series?run=0' in (run_dir / "report.html").read_text()
    samples = read_samples(run_dir / "samples.jsonl")
    assert [sample.position[0] for sample in samples] == ["g1", "g1", "g2", "g2"]
    assert "id: r1" in (run_dir / "config.yaml").read_text()


async def test_a_run_is_recorded_beside_its_other_results(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        for _ in range(3):
            trainer.pace.release()
        status, out, _ = await ended(await started([*arguments, "record=true"], tmp_path))
    path = tmp_path / "runs" / "r1" / "trajectories.jsonl"
    assert status == 0
    assert f"recording: {path} (4 samples, steps 1 to 2)" in out
    assert [sample.position[0] for sample in read_samples(path)] == ["g1", "g1", "g2", "g2"]


async def test_ctrl_c_stops_the_run_after_the_trainer_has_stopped(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        trainer.pace.release()
        process = await started(arguments, tmp_path)
        await until(lambda: trainer.pace.locked() and bool(trainer.starts), timeout_s=60)
        page = await page_of(process)
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {page.query['token']}"}) as session,
            session.get(page.with_path("/api/runs").with_query({})) as answer,
        ):
            (run,) = (await answer.json())["runs"]
        process.send_signal(signal.SIGINT)
        status, out, _ = await ended(process)
    assert trainer.stopped.is_set()
    assert status == 130
    assert "stopped" in out
    assert (run["run_id"], run["state"]) == ("r1", "running")


async def test_a_trainer_that_lost_the_run_is_asked_to_resume_it(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    broker = ScriptedRunBroker()
    async with serving(trainer.service, broker.service) as (server, target):
        value = document(tmp_path)
        value["endpoints"] = dict.fromkeys(("broker", "scheduler", "reward", "trainer"), target) | {
            "generators": [target]
        }
        process = await started(["run", str(write_document(tmp_path, value))], tmp_path)
        await until(lambda: len(trainer.starts) == 1, timeout_s=60)
        await server.stop(grace_s=0)
        trainer.forget()
        async with serving_at(target, trainer, broker):
            await until(lambda: len(trainer.starts) == 2, timeout_s=60)
            for _ in range(3):
                trainer.pace.release()
            status, out, err = await ended(process)
    assert (status, err) == (0, "")
    assert [request.resume for request in trainer.starts] == [False, True]
    assert "trainer restarted" in out


async def test_a_failed_run_ends_with_status_1(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    trainer.outcome = trainer_pb2.RUN_OUTCOME_FAILED
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        for _ in range(3):
            trainer.pace.release()
        status, out, _ = await ended(await started(arguments, tmp_path))
    assert status == 1
    assert "failed" in out


async def test_a_configuration_that_the_trainer_refuses_is_the_users_mistake(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(refusal="data.train: /data/x.jsonl: no such file")
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        status, _, err = await ended(await started(arguments, tmp_path))
    assert status == 2
    assert err.splitlines()[0].endswith(": data.train: /data/x.jsonl: no such file")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("balanced", "status"), [(True, 0), (False, 1)])
async def test_audit_says_whether_the_books_balance(tmp_path: Path, balanced: bool, status: int) -> None:
    broker = ScriptedRunBroker(balanced=balanced)
    async with serving(broker.service) as (_, target):
        found, out, _ = await ended(await started(["audit", "r1", "--broker", target], tmp_path))
    assert found == status
    assert "submitted 10 = trained 4 + dropped 2 (stale 2) + in flight 4" in out


async def test_status_shows_queues_generators_and_waits(tmp_path: Path) -> None:
    async with serving(ScriptedRunBroker().service) as (_, target):
        status, out, _ = await ended(await started(["status", "--broker", target], tmp_path))
    assert status == 0
    for words in ("run r1", "queued 3", "gen-0", "trainer waits for generator gen-0"):
        assert words in out


async def test_the_embedded_redis_keeps_its_data_over_restarts(tmp_path: Path) -> None:
    import redis

    folder = RunFolder(tmp_path)
    folder.create()
    for attempt in range(2):
        spec = redis_spec(folder, env=service_environment(os.environ, num_threads=1))
        process = SupervisedProcess(spec, on_change=folder.write_record)
        task = asyncio.create_task(process.run())
        await until(process.ready.is_set, timeout_s=60)
        with redis.Redis.from_url(redis_url(folder)) as client:
            assert client.get("kept") == (None if attempt == 0 else b"yes")
            client.set("kept", "yes")
            assert client.config_get("port") == {"port": "0"}
        await process.stop()
        await task


async def test_nothing_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, pathlib
from console.launch.embedded_redis import redis_spec
from console.config.run_folder import RunFolder
from console.launch.supervisor import ServiceSpec, SupervisedProcess, console_argv, service_environment

async def yes():
    return True

async def main():
    folder = RunFolder(pathlib.Path({str(tmp_path)!r}))
    folder.create()
    env = service_environment(os.environ, num_threads=1)
    argv = console_argv("serve", "scheduler", "--listen", "127.0.0.1:0")
    log = folder.log_of("scheduler")
    specs = [
        redis_spec(folder, env=env),
        ServiceSpec(name="scheduler", argv=argv, address="", env=env, log_path=log, is_ready=yes),
    ]
    tasks = [SupervisedProcess(spec, on_change=folder.write_record).run() for spec in specs]
    await asyncio.gather(*tasks)

asyncio.run(main())
"""
    launcher = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environment())
    folder = RunFolder(tmp_path)

    def pid_of(name: str) -> int | None:
        record = read_record(folder.services / f"{name}.json")
        return record.pid if record is not None and record.state == "ready" else None

    await until(lambda: pid_of("redis") is not None and pid_of("scheduler") is not None, timeout_s=60)
    await until(lambda: "listens" in folder.log_of("scheduler").read_text(), timeout_s=60)
    pids = [pid for name in ("redis", "scheduler") if (pid := pid_of(name)) is not None]
    launcher.kill()
    await launcher.wait()
    await until(lambda: all(started_ticks_of(pid) is None for pid in pids), timeout_s=20)


@asynccontextmanager
async def serving_at(target: str, trainer: ScriptedTrainer, broker: ScriptedRunBroker) -> AsyncIterator[None]:
    from penstock.network.rpc import Server

    server = Server(listen=target, services=[trainer.service, broker.service])
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace_s=0.2)


async def test_only_a_later_ctrl_c_does_not_wait_for_the_trainer(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(is_deaf=True)
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        process = await started(arguments, tmp_path)
        await until(lambda: bool(trainer.starts), timeout_s=60)
        process.send_signal(signal.SIGINT)
        asked_s = asyncio.get_running_loop().time()
        await until(trainer.stopped.is_set, timeout_s=60)
        ending = asyncio.create_task(ended(process))
        while not ending.done():
            process.send_signal(signal.SIGINT)
            await asyncio.wait({ending}, timeout=0.2)
        lived_s = asyncio.get_running_loop().time() - asked_s
        status, _, err = ending.result()
    assert status == 130
    assert FORCE_AFTER_S <= lived_s < FORCE_AFTER_S + 5
    assert "everything is ended at once" in err


async def test_a_run_that_is_interrupted_while_its_trainer_begins_is_not_left_to_it(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    trainer.may_answer.clear()
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        process = await started(arguments, tmp_path)
        await until(lambda: bool(trainer.starts), timeout_s=60)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        while b"stopping once the trainer has answered" not in (line := await process.stdout.readline()):
            assert line, "the output ended"
        trainer.may_answer.set()
        await until(trainer.stopped.is_set, timeout_s=60)
        status, out, _ = await ended(process)
    assert status == 130
    assert "stopped" in out


async def test_two_signals_at_once_stop_the_run_as_one_does(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        trainer.pace.release()
        process = await started(arguments, tmp_path)
        await until(lambda: trainer.pace.locked() and bool(trainer.starts), timeout_s=60)
        # As `timeout` does it: the process, then its group.
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        await until(trainer.stopped.is_set, timeout_s=60)
        process.send_signal(signal.SIGTERM)
        status, out, _ = await ended(process)
    assert status == 130
    assert "stopped" in out
    assert json.loads((tmp_path / "runs" / "r1" / "summary.json").read_text())["steps"] == 1


@pytest.mark.parametrize("keeps_its_run", [True, False])
async def test_a_drained_trainer_leaves_the_run_waiting_for_it(tmp_path: Path, keeps_its_run: bool) -> None:
    trainer = ScriptedTrainer()
    trainer.outcome = trainer_pb2.RUN_OUTCOME_DRAINED
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        process = await started(arguments, tmp_path)
        for _ in range(3):
            trainer.pace.release()
        await until(lambda: bool(trainer._events) and trainer._events[-1].HasField("finished"), timeout_s=60)
        trainer.outcome = trainer_pb2.RUN_OUTCOME_COMPLETED
        trainer.resume_by_itself()
        if not keeps_its_run:
            trainer.forget()
        for _ in range(3):
            trainer.pace.release()
        status, out, err = await ended(process)
    assert (status, err) == (0, "")
    assert "was stopped by a signal; waiting for it to come back" in out
    assert [request.resume for request in trainer.starts] == ([False] if keeps_its_run else [False, True])


async def test_a_stop_while_a_drained_trainer_is_waited_for_ends_within_seconds(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    trainer.outcome = trainer_pb2.RUN_OUTCOME_DRAINED
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        process = await started(arguments, tmp_path)
        for _ in range(3):
            trainer.pace.release()
        await until(lambda: bool(trainer._events) and trainer._events[-1].HasField("finished"), timeout_s=60)
        process.send_signal(signal.SIGTERM)
        status, out, _ = await asyncio.wait_for(ended(process), 30)
    assert status == 130
    assert "drained" in out


async def test_logs_and_stop_find_a_run_by_its_folder(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        process = await started(arguments, tmp_path)
        await until(lambda: bool(trainer.starts), timeout_s=60)
        folder = RunFolder(tmp_path / "runs" / "r1")
        folder.log_of("broker").write_text("".join(f"line {n}\n" for n in range(50)))
        _, out, _ = await ended(await started(["ps"], tmp_path))
        assert "console" in out
        _, out, _ = await ended(await started(["logs", "runs/r1", "broker", "-n", "2"], tmp_path))
        assert out == "line 48\nline 49\n"
        status, out, _ = await ended(await started(["stop", "runs/r1"], tmp_path))
        assert (status, "stopped" in out) == (0, True)
        assert (await ended(process))[0] == 130
