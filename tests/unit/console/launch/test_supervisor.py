"""Supervision with real, tiny processes: restarts, giving up, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from console.config.run_folder import ProcessRecord, RunFolder, read_record, started_ticks_of
from console.launch.restarts import MAX_FAILED_STARTS
from console.launch.supervisor import (
    ProcessState,
    ServiceFailedError,
    ServiceSpec,
    SupervisedProcess,
    last_line,
    service_environment,
)
from tests.helpers.waiting import until

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"


async def yes() -> bool:
    return True


async def never() -> bool:
    return False


def spec(
    folder: Path, code: str, is_ready: Callable[[], Awaitable[bool]] = yes, *, grace_s: float = 5.0
) -> ServiceSpec:
    return ServiceSpec(
        name="toy",
        argv=(sys.executable, "-S", "-c", code),
        address="127.0.0.1:1",
        env={"PATH": os.environ["PATH"]},
        log_path=folder / "toy.log",
        is_ready=is_ready,
        stop_grace_s=grace_s,
    )


async def test_a_killed_process_is_restarted_and_counted(tmp_path: Path) -> None:
    records: list[ProcessRecord] = []
    process = SupervisedProcess(spec(tmp_path, SLEEPS), on_change=records.append)
    task = asyncio.create_task(process.run())
    await until(process.ready.is_set)
    first = records[-1].pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: records[-1].state == ProcessState.READY and records[-1].pid != first)
    assert records[-1].num_restarts == 1
    await process.stop()
    await task
    assert records[-1].state == ProcessState.STOPPED
    assert started_ticks_of(records[-1].pid) is None


async def test_what_a_process_started_does_not_outlive_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "child"
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']); "
        f"open({str(pid_file)!r} + '.new', 'w').write(str(p.pid)); "
        f"import os; os.rename({str(pid_file)!r} + '.new', {str(pid_file)!r}); time.sleep(60)"
    )
    records: list[ProcessRecord] = []
    process = SupervisedProcess(spec(tmp_path, code), on_change=records.append)
    task = asyncio.create_task(process.run())
    await until(pid_file.exists)
    child = int(pid_file.read_text())
    await process.stop()
    await task
    await until(lambda: started_ticks_of(child) is None)


async def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    records: list[ProcessRecord] = []
    process = SupervisedProcess(spec(tmp_path, code, grace_s=0.2), on_change=records.append)
    task = asyncio.create_task(process.run())
    await until(lambda: last_line(tmp_path / "toy.log") == "deaf")
    await asyncio.wait_for(process.stop(), 5.0)
    await task
    assert started_ticks_of(records[-1].pid) is None


async def test_a_process_that_never_gets_ready_is_paused_with_its_last_words(tmp_path: Path) -> None:
    records: list[ProcessRecord] = []
    process = SupervisedProcess(
        spec(tmp_path, "print('no such model'); raise SystemExit(1)", never), on_change=records.append
    )
    task = asyncio.create_task(process.run())
    await until(lambda: process.state == ProcessState.PAUSED, timeout_s=30)
    assert process.num_restarts == MAX_FAILED_STARTS - 1
    assert re.fullmatch(r"ended with status 1: no such model; next try \d\d:\d\d:\d\d UTC", records[-1].why)
    await asyncio.wait_for(process.stop(), 5)
    await task


async def test_if_restarts_are_decided_elsewhere_it_gives_up_instead(tmp_path: Path) -> None:
    process = SupervisedProcess(
        spec(tmp_path, "print('no such model'); raise SystemExit(1)", never),
        on_change=lambda record: None,
        pauses=False,
    )
    with pytest.raises(ServiceFailedError, match=r"toy ended with status 1.*no such model.*toy\.log"):
        await asyncio.wait_for(process.run(), 20.0)


async def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    process = SupervisedProcess(spec(tmp_path, "raise SystemExit(2)", never), on_change=lambda record: None)
    with pytest.raises(ServiceFailedError, match="status 2"):
        await asyncio.wait_for(process.run(), 10.0)
    assert process.num_restarts == 0


def test_services_get_threads_on_purpose_and_download_nothing() -> None:
    env = service_environment({"PYTHONPATH": "mine", "PENSTOCK_TOKEN": "t"}, num_threads=3)
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["PYTHONPATH"].endswith(f"{os.pathsep}mine")
    assert env["PENSTOCK_TOKEN"] == "t"


def test_a_record_names_one_process_for_good(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    mine = ProcessRecord(
        name="console", pid=os.getpid(), started_ticks=started_ticks_of(os.getpid()) or 0,
        address="", state="ready", num_restarts=0,
    )  # fmt: skip
    folder.write_record(mine)
    assert folder.records() == [mine]
    assert mine.is_alive
    # Another process that was given the same number later is not this one.
    reused = ProcessRecord(**{**{name: getattr(mine, name) for name in mine.__slots__}, "started_ticks": 1})
    assert not reused.is_alive


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("", "[]", '{"name": "x"}', "\x00"):
        path.write_text(text)
        assert read_record(path) is None
