"""A process of a trainer that dies while all of them load: the trainer ends with the reason, and leaves none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.trainer.distributed.launch import RANK_LOST_STATUS
from tests.helpers.waiting import until
from tests.unit.trainer.builders import save_tiny_qwen2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
LEADS = """
import sys
from pathlib import Path
from services.trainer.distributed.coordinator import lead
from services.trainer.run.policy_loading import local_backend
from tests.helpers.trainers.two_processes import config_of

def loading(config, ranks):
    print("loading", flush=True)
    # Until it is ended: the others load, and wait for this process.
    sys.stdin.readline()
    return local_backend(config, ranks)

lead(config_of(Path(sys.argv[1]), processes=3), build=loading, torchrun=None)
print("loaded", flush=True)
"""
END_S = 30.0
"""Well below a minute, on a machine that is busy with other tests."""


def children_of(pid: int) -> list[int]:
    """Its processes that wait for its calls."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"worker_process" in command:
            found.append(int(path.parent.name))
    return found


@contextmanager
def leading(model: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The first process of three, which starts the others."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LEADS, str(model)]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize("moment", ["joining", pytest.param("loading", marks=pytest.mark.grid)])
async def test_a_process_that_dies_while_loading_ends_the_trainer_in_time(tmp_path: Path, moment: str) -> None:
    model = save_tiny_qwen2(tmp_path / "model")
    with leading(model, tmp_path / "log") as process:
        await until(lambda: len(children_of(process.pid)) == 2, timeout_s=60)
        others = children_of(process.pid)
        # Its libraries are still being imported, and the others wait for it to join the group; or all have joined.
        if moment == "loading":
            await until(lambda: "loading" in (tmp_path / "log").read_text(), timeout_s=90)
        os.kill(others[1], signal.SIGKILL)
        await until(lambda: process.poll() is not None, timeout_s=END_S)
    said = (tmp_path / "log").read_text()
    assert process.returncode == RANK_LOST_STATUS, said
    assert "process 2" in said
    assert "Traceback" not in said
    await until(lambda: not any(Path(f"/proc/{other}").exists() for other in others), timeout_s=END_S)
