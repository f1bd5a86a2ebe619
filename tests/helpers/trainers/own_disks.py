"""A trainer of two processes whose second one does not see the run's folder: there it has a disk of its own.

Needs root: the second process is given a mount namespace with an empty file system over that folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from services.trainer.distributed import launch
from services.trainer.distributed.coordinator import lead
from services.trainer.distributed.launch import StartedRanks
from services.trainer.distributed.sharded_backend import ShardedBackend
from services.trainer.distributed.torchrun_runs import TorchrunRuns
from services.trainer.run.policy_loading import local_backend
from services.trainer.run_sections import RunSettings
from tests.helpers.trainers.two_processes import config_of, on_lost
from tests.helpers.trainers.warm_ranks import HIDDEN, WarmRank

if TYPE_CHECKING:
    from torch.distributed import Store

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")


class _OnTwoMachines(TorchrunRuns):
    """As if torchrun had started the processes on two machines."""

    def __init__(self) -> None:
        super().__init__()
        self.started = StartedRanks(num_ranks=2, on_lost=on_lost)

    def begin(self) -> Store:
        return self.started.start()


@contextmanager
def two_disks(model: Path, run: RunSettings, **changes: object) -> Iterator[ShardedBackend]:
    """The trainer's backend; its run's folder exists."""
    config = config_of(model, **changes).model_copy(update={"run": run})  # type: ignore[arg-type]
    runs = _OnTwoMachines()

    def start(environment: Mapping[str, str]) -> WarmRank:
        return WarmRank({**environment, HIDDEN: str(run.dir)})

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "start_rank", start)
            backend = lead(config, build=local_backend, torchrun=runs, on_lost=on_lost)
        try:
            yield backend
        finally:
            backend.close()
    finally:
        runs.started.close()
        if dist.is_initialized():
            dist.destroy_process_group()
