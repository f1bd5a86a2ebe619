"""A Slurm cluster of real daemons on this machine: slurmctld, munged and a slurmd a node, in namespaces of their own.

Nodes share the machine's files and one loopback interface, to which all their names resolve; nothing outlives it, not
even its logs, so `SlurmCluster.wait` quotes them where it fails.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "unshare", "nsenter")
_REVOKED = timedelta(seconds=3)
_WAIT_S = 300.0
_TAIL_LINES = 40
# The limits on time are for a machine that has much else to do.
_SETTINGS = """
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=120
MessageTimeout=20
TCPTimeout=20
BatchStartTimeout=120
UnkillableStepTimeout=180
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SchedulerParameters=bf_interval=1,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
JobCompType=jobcomp/none
"""
_START = """
set -eu
cd "$1"
shift
ip link set lo up
# Without an address besides loopback's the resolver finds none at all.
ip link add d0 type veth peer name d1
ip address add 192.0.2.1/24 dev d0
ip link set d0 up
mount --bind hosts /etc/hosts
munged --force --key-file="$PWD/key" --socket="$PWD/munge.socket" --pid-file="$PWD/munged.pid" \
    --log-file="$PWD/munged.log" --seed-file="$PWD/seed"
slurmctld -D -i >slurmctld.log 2>&1 &
for node in "$@"; do slurmd -D -N "$node" >"slurmd-$node.log" 2>&1 & done
wait
"""


def reason_to_skip() -> str | None:
    """Why there can be no cluster here; None if there can."""
    search = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=search) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "namespaces and Slurm's daemons take root"


class SlurmCluster:
    """A running cluster."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder, self._pid = folder, pid

    def __call__(self, *command: str, folder: Path = Path("/")) -> subprocess.CompletedProcess[str]:
        """Runs a command on it, in `folder`."""
        inside = ("nsenter", "--mount", "--net", "--pid", f"--target={self._pid}", f"--wd={folder}", *command)
        environment = {**os.environ, "SLURM_CONF": str(self._folder / "slurm.conf")}
        return subprocess.run(inside, env=environment, capture_output=True, text=True, timeout=120, check=False)

    def states(self) -> set[str]:
        """States of all components of all jobs, in words."""
        return set(self("squeue", "--noheader", "--states=all", "--format=%T").stdout.split())

    def wait(self, what: str, condition: Callable[[], bool], *, log: Path) -> None:
        """Until `condition` holds; fails with what Slurm and the end of a job's log say."""
        hurried_s = 0.0
        for now_s in _moments(what, said=lambda: self._account(log)):
            if condition():
                return
            if now_s >= hurried_s + 1:
                self._hurry()
                hurried_s = now_s

    def _hurry(self) -> None:
        """Ends the time for which Slurm holds back what is queued again; backfill sleeps until something changes.

        Not at once: a job that begins in the second in which its last credential was revoked has a revoked one itself.
        """
        for line in self("squeue", "--noheader", "--states=PENDING", "--format=%i %V").stdout.splitlines():
            job, queued_at = line.split()
            if datetime.now() - datetime.fromisoformat(queued_at) > _REVOKED:
                self("scontrol", "update", f"JobId={job}", "StartTime=now")

    def _account(self, log: Path) -> str:
        asked = (("squeue", "--states=all"), ("sinfo", "--Node", "--long"), ("scontrol", "show", "job"))
        told = [(" ".join(command), self(*command).stdout) for command in asked]
        for path in (*sorted(self._folder.glob("*.log")), log):
            text = path.read_text(errors="replace") if path.exists() else "(none)"
            told.append((str(path), "\n".join(text.splitlines()[-_TAIL_LINES:])))
        return "\n".join(f"--- {name}\n{text}" for name, text in told)


@contextmanager
def slurm_cluster(nodes: Sequence[str]) -> Iterator[SlurmCluster]:
    """Starts a cluster; returns when its nodes are idle."""
    # A step's socket, `spool-NODE/NODE_JOB.STEP`, has 107 bytes at most: too few for many a test's own folder.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="slurm") as made, _started(Path(made), nodes) as cluster:
        yield cluster


@contextmanager
def _started(folder: Path, nodes: Sequence[str]) -> Iterator[SlurmCluster]:
    (folder / "state").mkdir()
    folder.chmod(0o755)
    (folder / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "key").chmod(0o600)
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(nodes)} {os.uname().nodename}\n")
    lines = (f"NodeName={name} NodeHostname=localhost Port={17001 + at} CPUs=1\n" for at, name in enumerate(nodes))
    partition = "PartitionName=main Nodes=ALL Default=YES State=UP\n"
    (folder / "slurm.conf").write_text(f"{_SETTINGS.format(folder=folder)}{''.join(lines)}{partition}")
    (folder / "start.sh").write_text(_START)
    apart = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    command = (*apart, "bash", str(folder / "start.sh"), str(folder), *nodes)
    with subprocess.Popen(command, env=environment) as outer:
        try:
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
            _until("namespaces", lambda: bool(children.read_text().split()))
            cluster = SlurmCluster(folder, int(children.read_text().split()[0]))
            cluster.wait(
                "idle nodes",
                lambda: cluster("sinfo", "--noheader", "--Node", "--format=%t").stdout.split() == ["idle"] * len(nodes),
                log=folder / "slurmctld.log",
            )
            yield cluster
        finally:
            outer.kill()


def _until(what: str, condition: Callable[[], bool]) -> None:
    for _ in _moments(what, said=str):
        if condition():
            return


def _moments(what: str, *, said: Callable[[], str]) -> Iterator[float]:
    """Moments at which to look for `what`; fails with what `said` says when there have been enough."""
    deadline_s = time.monotonic() + _WAIT_S
    while (now_s := time.monotonic()) < deadline_s:
        yield now_s
        time.sleep(0.2)
    raise AssertionError(f"no {what} in {_WAIT_S:g} s\n{said()}")
