"""`penstock plan --deploy --for slurm` on a real slurmctld and three slurmd: refused, requeued, resumed, complete."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.console import ROOT
from tests.helpers.plans.two_sites import (
    CENTER,
    MACHINES,
    RUN_ID,
    deploy,
    issue_certificates,
    make_data,
    run_document,
)
from tests.helpers.slurm_cluster import SlurmCluster, reason_to_skip, slurm_cluster

NUM_STEPS = 60
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slurm,
    pytest.mark.flaky(reruns=0),
    pytest.mark.timeout(900),
    pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip())),
]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster((*MACHINES, CENTER)) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The deployment, with settings filled in."""
    data = make_data(tmp_path / "data")
    found = deploy(tmp_path / "out", "slurm", run_document(data, num_steps=NUM_STEPS), has_center=True)
    command = tmp_path / "bin" / "penstock"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m console "$@"\n')
    command.chmod(0o755)
    settings = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    settings["PENSTOCK_SECRETS"] = str(tmp_path / "certificates")
    lines = (f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
    (found / "settings.env").write_text("".join(lines))
    return found


def test_a_job_is_refused_requeued_when_a_component_ends_and_resumed_to_the_end(
    cluster: SlurmCluster, folder: Path
) -> None:
    log = folder / "job.log"
    run_folder = folder / "home" / "runs" / RUN_ID

    def times(text: str) -> int:
        return log.read_text().count(text) if log.exists() else 0

    def said(text: str, num_times: int = 1) -> bool:
        return times(text) >= num_times

    def submit() -> None:
        told = cluster("./submit.sh", folder=folder)
        assert told.returncode == 0, told.stderr

    issue_certificates(folder.parent, run_id="another")
    submit()
    cluster.wait("refusal", lambda: "FAILED" in cluster.states(), log=log)
    assert said("not of run deployed; issue the one for l4-0 of run deployed")
    assert said("penstock: nothing was started")
    assert not run_folder.exists()

    issue_certificates(folder.parent)
    log.unlink()
    submit()
    lost = (("l4-0", "component 1 (far: l4-0)"), (CENTER, f"component 2 (home: {CENTER})"))
    for num_before, (machine, component) in enumerate(lost):
        cluster.wait("steps", partial(said, f"step {4 + 20 * num_before}/"), log=log)
        cluster("pkill", "--signal", str(int(signal.SIGKILL)), "--full", f"console node node-{machine}")
        cluster.wait("requeue", partial(said, "queued again", num_before + 1), log=log)
        assert said(f"penstock: {component} ended with status 137; the job is queued again")
        assert times(f"continue with: penstock run --resume {run_folder}") == num_before + 1

    cluster.wait("end", lambda: "COMPLETED" in cluster.states(), log=log)
    assert times(f"resumes {run_folder}") == len(lost)
    assert said("in flight 0: balanced")
    assert said("penstock: the run is complete")
