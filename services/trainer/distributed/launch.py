"""Launches the processes of one trainer: from the first one on this machine, or by torchrun on many.

Without torchrun, process 0 starts the others when a run needs them, and they end with the run or with process 0. Under
torchrun every process runs `penstock serve trainer`: process 0 serves, the others wait for its runs. Either way, a lost
process ends process 0 too, so that its supervisor restarts all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

import services
from penstock.config import ConfigError
from penstock.process.bound_child import bound
from penstock.security import Security

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_VARIABLE = "PENSTOCK_RANK_STORE"
DEVICE_KEY = "device"
"""Key of trainer.device in a run's store."""
REPLICAS_KEY = "replicas"
"""Key of trainer.parallel.replicate in a run's store."""
STAGES_KEY = "stages"
"""Key of trainer.parallel.pipeline in a run's store."""
SPLITS_KEY = "splits"
"""Key of trainer.parallel.tensor in a run's store."""
EXPERT_KEY = "expert"
"""Key of trainer.parallel.expert in a run's store."""
ISLANDS_KEY = "islands"
"""Key of trainer.parallel.islands in a run's store."""
RANK_LOST_STATUS = 70
END_TIMEOUT_S = 30.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process under torchrun, according to the variables that torchrun sets."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    """Processes on its machine."""

    @property
    def spans_machines(self) -> bool:
        """Whether some of the others are on another machine."""
        return self.num_local_ranks < self.num_ranks

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Place | None:
        """None if torchrun did not start this process, or started it alone."""
        if "TORCHELASTIC_RUN_ID" not in environ or environ.get("WORLD_SIZE", "1") == "1":
            return None
        return cls(
            rank=int(environ["RANK"]),
            num_ranks=int(environ["WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            num_local_ranks=int(environ["LOCAL_WORLD_SIZE"]),
        )


def end_process(reason: str) -> None:
    """End at once, to be restarted: the processes can do nothing together any more, not even write a checkpoint."""
    _log.critical("this trainer ends", reason=reason)
    os._exit(RANK_LOST_STATUS)


@dataclass(slots=True, kw_only=True)
class StartedRanks:
    """Processes 1 and up of a trainer, started on its machine by the first; `close` in the thread that started them."""

    num_ranks: int
    on_lost: Callable[[str], None]
    _folder: tempfile.TemporaryDirectory[str] = field(init=False)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)
    _is_closing: threading.Event = field(default_factory=threading.Event, init=False)

    def start(self) -> Store:
        """Starts them; returns where they meet: a file that only this user can read."""
        import torch.distributed as dist

        self._folder = tempfile.TemporaryDirectory(prefix="penstock-ranks-")
        path = str(Path(self._folder.name) / "store")
        stay_on_loopback()
        for rank in range(1, self.num_ranks):
            environment = {STORE_VARIABLE: path, "WORLD_SIZE": str(self.num_ranks)}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = start_rank(environment)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        return dist.FileStore(path, self.num_ranks)

    def close(self) -> None:
        """Waits until they have ended, as they do once the group is closed; kills those that do not."""
        self._is_closing.set()
        if not self._processes:
            return
        for process in self._processes:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._is_closing.is_set():
            self.on_lost(f"its process {rank} ended with status {status}; the log above says why")


def start_rank(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process of this machine's trainer; `environment` is added to that of this process."""
    # The kernel ends it with the thread that starts it, which lives as long as the run.
    command = bound(sys.executable, "-P", "-m", "services.trainer.worker_process", ends_by=signal.SIGKILL)
    return subprocess.Popen(command, env={**_child_environment(), **environment}, stdin=subprocess.DEVNULL)


def stay_on_loopback() -> None:
    """For processes of one machine: gloo has no authentication, and only this variable says where it listens."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def check_trust(place: Place | None, security: Security, *, trusts_network: bool) -> None:
    """Refuses processes on several machines if everything else is protected; raises ConfigError."""
    if place is not None and place.spans_machines and security.has_credentials and not trusts_network:
        raise ConfigError(
            f"trusts_network: torchrun started {place.num_ranks} processes on several machines, between which weights "
            "and samples travel without encryption or authentication, while TLS or a token protects everything else; "
            "put them on a network of their own and set trusts_network: true, or train on one machine"
        )


def check_size(place: Place | None, num_processes: int) -> None:
    """Refuses a run that needs another number of processes than torchrun started; raises ConfigError."""
    if place is not None and place.num_ranks != num_processes:
        raise ConfigError(
            f"trainer.processes: {num_processes}, but torchrun started this trainer with {place.num_ranks} "
            f"processes; set it to {place.num_ranks}"
        )


def _child_environment() -> dict[str, str]:
    """This process' environment, extended by the location of this program."""
    root = str(Path(services.__path__[0]).resolve().parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path}
