"""The Slurm job of `plan --deploy`, read without a cluster; tests/e2e/deployments/test_slurm.py runs it on one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from console.config.config import load_run_config
from console.deploy.configurations import PLAIN_RUN
from console.deploy.deployment import write_deployment
from console.node.config import HostConfig, read_machine
from penstock.config import ConfigError
from penstock.process.grace_periods import STOP_GRACE_S
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.service_placement.service_places import with_center
from tests.helpers.plans.problems import plan, problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    of = plan([("l40s-0", 1, 4), ("l4-0", 2, 4)], [("a100-0", 4), ("l40s-0", 1)])
    write_deployment(tmp_path / "out", CostModel(problem("tiny_04")), of, engine="slurm")
    return tmp_path / "out"


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=30, check=False
    )


def install(folder: Path, **scripts: str) -> dict[str, str]:
    """Programs of those names; returns the PATH with them."""
    folder.mkdir(exist_ok=True)
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_head_and_each_kind_of_machine_of_a_site_is_a_component(folder: Path) -> None:
    parts = (folder / "job.sh").read_text().split("#SBATCH hetjob\n")
    nodes = [line.partition("=")[2] for part in parts for line in part.splitlines() if "--nodelist" in line]
    assert nodes == ["a100-0", "l40s-0", "l4-0,l4-1"]
    assert "#SBATCH --requeue\n" in parts[0]
    margin_s = int(parts[0].partition("--signal=B:USR1@")[2].split()[0])
    assert margin_s > STOP_GRACE_S["run"]
    # No path of the machine that planned, and no container's.
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not any(str(folder) in text or "/config" in text for text in texts)


def test_machines_that_the_cluster_does_not_have_are_refused_before_anything_is_queued(
    folder: Path, tmp_path: Path
) -> None:
    known = {"a100-0": "gpu:a100:8(S:0-1)", "l40s-0": "gpu:4,shard:8", "l4-0": "gpu:l4:4,gpu:l4:4"}
    cases = "".join(f"--nodes={name}) echo '{gres}' ;;\n" for name, gres in known.items())
    path = install(tmp_path / "bin", sinfo=f"case $3 in\n{cases}esac", sbatch="touch queued")
    told = run(folder / "submit.sh", **path)
    assert told.returncode == 2
    assert told.stderr.splitlines() == [
        "penstock: l40s-0: has 4 GPUs by its Gres (gpu:4,shard:8), and the plan uses 8; correct `nodes` in the problem "
        "and plan again",
        "penstock: l4-1: is no node of this cluster (sinfo -N); name the machines of the problem after its nodes",
    ]
    assert not (folder / "queued").exists()


def test_what_ends_a_job_first_is_its_reason_though_its_time_limit_comes_while_it_ends(
    folder: Path, tmp_path: Path
) -> None:
    path = install(
        tmp_path / "bin",
        # Component 1 is lost, the others end when they are told.
        srun='case "$*" in *check) exit 0 ;; --het-group=1*) exit 137 ;; esac\nuntil [ -e told ]; do sleep 0.05; done',
        scancel="kill -USR1 $PPID; touch told",
        scontrol='[ "$1" = requeue ] && touch requeued && exit 1\necho JobId=1 JobState=RUNNING',
    )
    told = run(folder / "job.sh", SLURM_SUBMIT_DIR=str(folder), SLURM_JOB_ID="1", **path)
    assert told.stderr.splitlines() == [
        "penstock: component 1 (r0: l40s-0) ended with status 137; the job is queued again and the run resumed"
    ]
    assert (folder / "requeued").exists()


def test_a_machine_starts_what_is_its_own_and_ends_all_when_one_ends(folder: Path, tmp_path: Path) -> None:
    (folder / "settings.env").write_text(f"export PENSTOCK_SECRETS={tmp_path}\n")
    path = install(
        tmp_path / "bin",
        # The run ends when both others have been started.
        penstock='echo "penstock $*"; [ "$1" = node ] && touch node && exec sleep 60\n'
        'while [ "$1" = run ] && ! [ -e node -a -e torchrun ]; do sleep 0.05; done',
        torchrun='echo "torchrun ${@: -3}"; touch torchrun; exec sleep 60',
    )
    told = run(folder / "machine.sh", "start", SLURMD_NODENAME="a100-0", **path)
    assert told.returncode == 0, told.stderr
    assert sorted(told.stdout.splitlines()) == [
        "penstock node node-a100-0.yaml",
        "penstock run run.yaml --resume-or-start",
        "torchrun trainer --config trainer.yaml",
    ]
    assert run(folder / "machine.sh", "check", SLURMD_NODENAME="l4-1", **path).stdout == (
        "penstock doctor machine-l4-1.yaml\n"
    )
    # A node that ends by itself is no complete run.
    path = install(tmp_path / "bin", penstock="exit 0")
    assert run(folder / "machine.sh", "start", SLURMD_NODENAME="l4-1", **path).returncode == 1
    told = run(folder / "machine.sh", "start", SLURMD_NODENAME="other", **path)
    assert (told.returncode, told.stderr) == (2, "penstock: other: is in no plan here\n")


def test_settings_that_are_missing_are_named(folder: Path) -> None:
    told = run(folder / "machine.sh", "check", SLURMD_NODENAME="l4-1")
    assert told.returncode != 0
    assert "PENSTOCK_SECRETS: set it in settings.env" in told.stderr


def test_relative_paths_are_refused() -> None:
    of = plan([("l4-0", 2, 4)], [("a100-0", 8)])
    run = {**PLAIN_RUN, "model": {"path": "models/mine"}}
    with pytest.raises(ConfigError, match=r"model.path: models/mine is relative"):
        write_deployment(Path("/nowhere"), CostModel(problem("tiny_04")), of, engine="slurm", run=run)


def test_a_machine_without_gpus_is_a_component_that_runs_broker_and_scheduler(tmp_path: Path) -> None:
    stated = problem("tiny_04", "hosts=[{name: ctl, region: r0}]")
    of = with_center(stated, plan([("l4-0", 2, 4)], [("a100-0", 8)]), None)
    run_document = {**PLAIN_RUN, "run": {"dir": "/shared/runs"}}
    folder = tmp_path / "out"
    write_deployment(folder, CostModel(stated), of, engine="slurm", run=run_document)
    components = (folder / "job.sh").read_text().split("#SBATCH hetjob\n")
    (mine,) = [part for part in components if "--nodelist=ctl-0\n" in part]
    assert "--gres" not in mine
    assert "expect ctl-0 0\n" in (folder / "submit.sh").read_text()
    (folder / "settings.env").write_text(f"export PENSTOCK_SECRETS={tmp_path}\n")
    path = install(tmp_path / "bin", penstock='echo "penstock $*"')
    assert (
        run(folder / "machine.sh", "start", SLURMD_NODENAME="ctl-0", **path).stdout == "penstock node node-ctl-0.yaml\n"
    )
    host = read_machine(folder / "r0" / "node-ctl-0.yaml")
    assert isinstance(host, HostConfig)
    assert (host.brokers[0].listen, host.dir) == ("0.0.0.0:7301", Path("runs/ctl-0"))
    head = load_run_config(folder / "r0" / "run.yaml")
    assert (head.endpoints.broker, head.endpoints.scheduler) == ("ctl-0:7301", "ctl-0:7306")
