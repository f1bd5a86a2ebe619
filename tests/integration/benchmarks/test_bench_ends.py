"""A benchmark that is ended or killed leaves nothing behind: no process, and no folder once the next has started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.scratch import PREFIX, remove_abandoned, scratch_folder
from tests.helpers.processes import children_of, is_running
from tests.helpers.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
TIMEOUT_S = 60.0
BENCHMARK = """
import pathlib, shutil, signal, subprocess, sys
from benchmarks.scratch import scratch_folder
from penstock.process.bound_child import bound
with scratch_folder(pathlib.Path(sys.argv[1])):
    child = subprocess.Popen(bound(shutil.which("sleep"), "600", ends_by=signal.SIGKILL))
    print(child.pid, flush=True)
    child.wait()
"""


@pytest.fixture
def root() -> Iterator[Path]:
    # Not pytest's own: the name of a Unix socket has 107 characters at most.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def wait_until(condition: Callable[[], bool]) -> None:
    asyncio.run(until(condition, timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("sigint", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background_of_a_script"])
def test_a_benchmark_that_is_terminated_cleans_up(root: Path, sigint: signal.Handlers) -> None:
    command = [sys.executable, "-m", "console", "bench", "broker"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    def begin() -> None:
        signal.signal(signal.SIGINT, sigint)

    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(root)}, preexec_fn=begin, **quiet)
    children: set[int] = set()
    try:
        wait_until(lambda: len(children_of(process.pid)) > 0)
        children = children_of(process.pid)
        assert len(list(root.glob(f"{PREFIX}*"))) == 1
    finally:
        process.terminate()
    try:
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
    wait_until(lambda: not any(map(is_running, children)))
    assert list(root.iterdir()) == []


def test_nothing_outlives_a_benchmark_that_is_killed(root: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", BENCHMARK, str(root)], stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        # Until it is the command it is not bound yet.
        wait_until(lambda: Path(f"/proc/{child}/comm").read_text().strip() == "sleep")
        assert len(list(root.glob(f"{PREFIX}*"))) == 1
    finally:
        process.kill()
    process.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: not is_running(child))
    remove_abandoned(root)
    assert list(root.iterdir()) == []


def test_only_unused_folders_are_removed(root: Path) -> None:
    other = root / f"{PREFIX}of-something-else"
    other.mkdir()
    with scratch_folder(root) as first, scratch_folder(root) as second:
        (first / "content").write_bytes(b"1")
        remove_abandoned(root)
        assert first.is_dir()
        assert second.is_dir()
    assert list(root.iterdir()) == [other]
