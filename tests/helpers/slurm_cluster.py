"""A Slurm cluster of real daemons on this machine: slurmctld, munged and a slurmd a node, in namespaces of their own.

Nodes share the machine's files and one loopback interface, to which all their names resolve; nothing outlives it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "unshare", "nsenter")
_START_S = 60.0
# `cred_expire` is also how long a requeued job is held back, less a second; 120 s otherwise.
_SETTINGS = """
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
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
        self._settings, self._pid = folder / "slurm.conf", pid

    def __call__(self, *command: str, folder: Path = Path("/")) -> subprocess.CompletedProcess[str]:
        """Runs a command on it, in `folder`."""
        inside = ("nsenter", "--mount", "--net", "--pid", f"--target={self._pid}", f"--wd={folder}", *command)
        environment = {**os.environ, "SLURM_CONF": str(self._settings)}
        return subprocess.run(inside, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def states(self) -> set[str]:
        """States of all components of all jobs, in words."""
        return set(self("squeue", "--noheader", "--states=all", "--format=%T").stdout.split())


@contextmanager
def slurm_cluster(folder: Path, nodes: Sequence[str]) -> Iterator[SlurmCluster]:
    """Starts a cluster whose files are in `folder`; returns when its nodes are idle."""
    (folder / "state").mkdir(parents=True)
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
            wait("namespaces", lambda: bool(children.read_text().split()), timeout_s=_START_S)
            cluster = SlurmCluster(folder, int(children.read_text().split()[0]))
            wait(
                "idle nodes",
                lambda: cluster("sinfo", "--noheader", "--Node", "--format=%t").stdout.split() == ["idle"] * len(nodes),
                timeout_s=_START_S,
            )
            yield cluster
        finally:
            outer.kill()


def wait(what: str, condition: Callable[[], bool], *, timeout_s: float, said: Callable[[], str] = str) -> None:
    """Until `condition` holds; fails with what `said` says."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"no {what} in {timeout_s:g} s\n{said()}"
        time.sleep(0.2)
