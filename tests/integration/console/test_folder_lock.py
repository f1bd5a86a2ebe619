"""Two consoles on one run folder, each a process of its own: one works there, the other says who does."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from console.config.folder_lock import LOCK_NAME
from tests.helpers.brokers.scripted_run import ScriptedRunBroker, ScriptedTrainer
from tests.helpers.console import penstock
from tests.helpers.waiting import until
from tests.integration.console.test_run_command import attached, ended, started

# Each starts several processes: what they share the machine with decides how long that takes.
pytestmark = pytest.mark.timeout(240)


async def first_that_ends(processes: list[asyncio.subprocess.Process]) -> asyncio.subprocess.Process:
    waits = {asyncio.create_task(process.wait()): process for process in processes}
    try:
        done, _ = await asyncio.wait(waits, timeout=40.0, return_when=asyncio.FIRST_COMPLETED)
        assert done, "both work in the folder"
        return waits[done.pop()]
    finally:
        for wait in waits:
            wait.cancel()


def assert_refused(status: int, err: str, *, pid: int) -> None:
    assert (status, err.count("\n")) == (2, 1), err
    assert f"this run is under way (process {pid} on {socket.gethostname()}); stop it first: penstock stop" in err


async def test_a_console_elsewhere_is_noticed_and_one_that_was_killed_is_not(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    run_dir = tmp_path / "runs" / "r1"
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        begun = await started(arguments, tmp_path)
        await until(lambda: len(trainer.starts) == 1, timeout_s=60)
        # As a console on another machine finds it: the process is none of that machine's.
        (run_dir / "services" / "console.json").unlink()
        status, _, err = await ended(await started(["run", "--resume", str(run_dir)], tmp_path))
        assert_refused(status, err, pid=begun.pid)
        assert len(trainer.starts) == 1

        begun.kill()
        await begun.wait()
        resumed = await started(["run", "--resume", str(run_dir)], tmp_path)
        await until(lambda: len(trainer.starts) == 2, timeout_s=60)
        resumed.send_signal(signal.SIGTERM)
        assert (await ended(resumed))[0] == 130


@pytest.mark.parametrize("is_resume", [False, True])
async def test_of_two_that_begin_at_once_one_is_refused(tmp_path: Path, *, is_resume: bool) -> None:
    trainer = ScriptedTrainer()
    run_dir = tmp_path / "runs" / "r1"
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        if is_resume:
            begun = await started(arguments, tmp_path)
            await until(lambda: len(trainer.starts) == 1, timeout_s=60)
            begun.send_signal(signal.SIGTERM)
            await ended(begun)
            trainer.forget()
            trainer.stopped.clear()
            arguments = ["run", "--resume", str(run_dir)]
        num_before = len(trainer.starts)
        pair = [await started(arguments, tmp_path) for _ in range(2)]
        refused = await first_that_ends(pair)
        other = pair[1 - pair.index(refused)]
        status, _, err = await ended(refused)
        assert status == 2, err
        if is_resume or "under way" in err:
            assert_refused(status, err, pid=other.pid)
        await until(lambda: len(trainer.starts) == num_before + 1, timeout_s=60)
        other.send_signal(signal.SIGTERM)
        assert (await ended(other))[0] == 130


async def test_a_folder_that_never_became_a_run_is_no_run(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
        (tmp_path / "runs" / "r1").mkdir(parents=True)
        (tmp_path / "runs" / "r1" / LOCK_NAME).touch()
        checked = await asyncio.to_thread(penstock, *arguments, "--dry-run", cwd=tmp_path)
    assert (checked.returncode, checked.stderr) == (0, "")
