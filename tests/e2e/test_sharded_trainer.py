"""A run whose model is sharded over two processes: either is killed, and it resumes, within its staleness bound."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import assert_balanced, assert_within_bound, running, small_run

pytestmark = [pytest.mark.e2e, pytest.mark.grid, pytest.mark.flaky(reruns=0), pytest.mark.timeout(600)]


def other_process(pid: int) -> int | None:
    """The process that the trainer started beside itself."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"worker_process" in (path / "cmdline").read_bytes():
                return int(path.name)
        except OSError:
            # It ended while it was looked at.
            continue
    return None


def test_a_killed_process_of_two_ends_the_trainer_which_resumes(task, tmp_path):
    settings = {"run__checkpoint_every_steps": 1, "run__num_eval_prompts": 0, "algorithm__max_staleness": 4}
    document = small_run(task, tmp_path, run__num_steps=6, **settings)
    document["trainer"] = {"processes": [1, 2]}
    with running(document, tmp_path) as run:
        run.wait_for_step(2)
        (trainer,) = [record for record in run.folder.records() if record.name == "trainer"]
        other = other_process(trainer.pid)
        assert other is not None
        os.kill(other, signal.SIGKILL)
        run.wait_for("a restart of the trainer", lambda: run.num_restarts("trainer") == 1)
        assert run.end() == 0, run.text
        summary, metrics = run.summary(), run.metrics()
        log = run.folder.log_of("trainer").read_text()

    assert "its process 1 ended with status -9" in log or "lost each other" in log
    assert [step["policy_version"] for step in metrics] == list(range(1, 7))
    assert_balanced(summary, num_samples=6 * 8 * 4)
    assert_within_bound(run, 4)
