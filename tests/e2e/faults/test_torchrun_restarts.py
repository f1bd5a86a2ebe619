"""A trainer of two torchruns, as on two machines: either process is killed, and both go on from a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from quickstart.prepare import Prepared
from tests.e2e.runs import Run, assert_balanced, running, small_run, wait_for_listeners
from tests.helpers.console import environment
from tests.helpers.ports import free_addresses

pytestmark = [pytest.mark.e2e, pytest.mark.grid, pytest.mark.flaky(reruns=0), pytest.mark.timeout(600)]

TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
NUM_STEPS = 9
RESUMED_S = 150.0
"""From a kill until two more steps; a process that looks for a dead one gives up after more than four minutes."""


def meeting(kind: str, rank: int, port: str) -> tuple[str, ...]:
    """As `penstock plan --deploy` writes it, or as one starts torchrun by hand."""
    if kind == "static":
        return (f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}")
    return ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=e2e", "--local-addr=127.0.0.1")


class Agents:
    """The two torchruns."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def pid_of(self, rank: int) -> int | None:
        """The trainer's process of that rank; None while it is not there."""
        agents = {process.pid for process in self._processes}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in agents and f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0"):
                    return int(path.name)
            except OSError:
                # It ended while it was looked at.
                continue
        return None

    def kill(self, rank: int) -> None:
        """kill -9 of a process."""
        pid = self.pid_of(rank)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


@contextmanager
def two_torchruns(kind: str, settings: dict[str, Any], folder: Path) -> Iterator[Agents]:
    """Ended as a supervisor does; their logs are in the folder."""
    config = folder / "trainer.yaml"
    config.write_text(yaml.safe_dump(settings))
    (address,) = free_addresses(1)
    processes = []
    try:
        for rank in range(2):
            met = meeting(kind, rank, address.rpartition(":")[2])
            with (folder / f"torchrun-{rank}.log").open("wb") as log:
                command = (*TORCHRUN, *met, "--max-restarts=5", "--shutdown-timeout=305")
                processes.append(
                    subprocess.Popen(
                        (*command, "-m", "console", "serve", "trainer", "--config", str(config)),
                        cwd=folder,
                        env=environment() | {"GLOO_SOCKET_IFNAME": "lo"},
                        stdout=log,
                        stderr=log,
                    )
                )
        yield Agents(processes)
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_a_killed_process_of_two_torchruns_restarts_both_and_the_run_goes_on(
    kind: str, task: Prepared, tmp_path: Path
) -> None:
    listen, weights = free_addresses(2)
    trainer = {
        "listen": listen,
        "weights_listen": weights,
        "state_dir": str(tmp_path / "state"),
        "allowed_roots": [str(tmp_path), str(task.model_dir.parent)],
    }
    settings = {"run__checkpoint_every_steps": 1, "run__num_eval_prompts": 0, "algorithm__max_staleness": 4}
    document = small_run(task, tmp_path, run__num_steps=NUM_STEPS, endpoints__trainer=listen, **settings)
    document["trainer"] = {"processes": 2}
    with two_torchruns(kind, trainer, tmp_path) as agents:
        wait_for_listeners([listen])
        with running(document, tmp_path) as run:
            for rank in (1, 0):
                run.wait_for_step(run.num_steps + 2)
                agents.kill(rank)
                goes_on(run)
            assert run.end() == 0, run.text

    assert [step["policy_version"] for step in run.metrics()] == list(range(1, NUM_STEPS + 1))
    assert_balanced(run.summary(), num_samples=NUM_STEPS * 8 * 4)


def goes_on(run: Run) -> None:
    """Until the trainer has taken a step more than when it was killed."""
    goal = run.num_steps + 1
    run.wait_for(f"step {goal} after a kill", lambda: run.num_steps >= goal, timeout_s=RESUMED_S)
