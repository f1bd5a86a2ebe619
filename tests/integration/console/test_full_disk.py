"""A run whose folder takes no more ends by name and is resumed, whatever was being written."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from console.config.run_folder import RunFolder
from console.config.sections import LogSection
from console.launch.disk_watch import MIN_FREE_BYTES, FolderRefusedError
from console.launch.service_group import ServiceProcesses
from console.launch.supervisor import ServiceSpec
from penstock.security import NO_SECURITY
from tests.helpers.brokers.scripted_run import ScriptedRunBroker, ScriptedTrainer
from tests.helpers.console import penstock
from tests.helpers.full_disk import fill, small_disk
from tests.helpers.waiting import until
from tests.integration.console.test_run_command import attached, ended, started

# Each starts several processes: what they share the machine with decides how long that takes.
pytestmark = pytest.mark.timeout(240)
DISK_BYTES = 16 * 2**20


@asynccontextmanager
async def running(folder: RunFolder, code: str) -> AsyncIterator[tuple[ServiceProcesses, ServiceSpec]]:
    """A process kept running in that folder, once it is up."""

    async def yes() -> bool:
        return True

    services = ServiceProcesses(folder, security=NO_SECURITY, log=LogSection())
    spec = ServiceSpec(
        name="toy",
        argv=(sys.executable, "-S", "-c", code),
        address="",
        env={},
        log_path=folder.log_of("toy"),
        is_ready=yes,
    )
    services.launch(spec)
    await services.wait_ready("toy", timeout_s=60)
    try:
        yield services, spec
    finally:
        await services.stop(["toy"])


async def test_a_log_line_that_the_disk_refuses_ends_the_run_by_name(tmp_path: Path) -> None:
    with small_disk(DISK_BYTES) as disk:
        folder = RunFolder(disk / "r1")
        folder.create()
        go = tmp_path / "go"
        code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        code += "while True: print('x' * 100_000, flush=True); time.sleep(0.01)"
        async with running(folder, code) as (services, _):
            fill(disk)
            go.touch()
            with pytest.raises(FolderRefusedError, match=r"r1: the disk is full: 0\.0 MiB free, .*--resume"):
                await asyncio.wait_for(services.watch(), 20)
            assert services.records["toy"].is_alive


async def test_a_process_record_that_the_disk_refuses_ends_the_run_by_name(tmp_path: Path) -> None:
    with small_disk(DISK_BYTES) as disk:
        folder = RunFolder(disk / "r1")
        folder.create()
        go = tmp_path / "go"
        code = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nraise SystemExit(1)"
        async with running(folder, code) as (services, _):
            fill(disk)
            go.touch()
            with pytest.raises(FolderRefusedError, match="the disk is full"):
                await asyncio.wait_for(services.watch(), 20)
        assert not list(folder.services.glob(".*"))


@pytest.mark.parametrize("leave", [0, MIN_FREE_BYTES // 2])
async def test_a_run_ends_before_its_disk_is_full_and_is_resumed(tmp_path: Path, leave: int) -> None:
    trainer = ScriptedTrainer()
    with small_disk(DISK_BYTES) as disk:
        async with attached(disk, trainer, ScriptedRunBroker()) as arguments:
            process = await started(arguments, tmp_path)
            await until(lambda: bool(trainer.starts), timeout_s=60)
            filler = fill(disk, leave=leave)
            status, out, err = await ended(process)
            assert (status, len(err.splitlines())) == (1, 1), (out, err)
            run_dir = disk / "runs" / "r1"
            assert err.startswith(f"penstock: {run_dir}: the disk is full: ")
            assert err.endswith(f"free some space, then continue with: penstock run --resume {run_dir}\n")
            assert trainer.stopped.is_set()

            refused = await asyncio.to_thread(penstock, "run", "--resume", str(run_dir), cwd=tmp_path)
            assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
            assert "the disk is full" in refused.stderr
            filler.unlink()
            trainer.forget()
            trainer.stopped.clear()
            for _ in range(3):
                trainer.pace.release()
            status, out, err = await ended(await started(["run", "--resume", str(run_dir)], tmp_path))
            assert (status, err) == (0, ""), out
            assert "step 3/3" in out


async def test_a_recording_that_the_disk_refuses_ends_the_run_by_name(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    with small_disk(DISK_BYTES) as disk:
        filler = fill(disk)
        async with attached(tmp_path, trainer, ScriptedRunBroker()) as arguments:
            recording = disk / "kept.jsonl"
            process = await started([*arguments, f"record={recording}"], tmp_path)
            status, out, err = await ended(process)
        assert (status, len(err.splitlines())) == (1, 1), (out, err)
        assert "recording: it stopped: " in out
        assert err.startswith(f"penstock: {recording}: the disk is full: ")
        assert err.endswith(f"penstock run --resume {tmp_path / 'runs' / 'r1'}\n")
        filler.unlink()
