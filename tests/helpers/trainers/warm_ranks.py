"""A trainer's other processes, forked from one that has imported PyTorch and transformers already.

Each would take four seconds of a core for that alone. That they start as a trainer starts them is shown where they are
killed (`test_lost_rank`) and by whole runs (`e2e/test_sharded_trainer`).
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from penstock.process.bound_child import end_with_parent
from services.trainer import worker_process
from tests.helpers.trainers.hidden_folder import hide

HIDDEN = "PENSTOCK_TEST_HIDDEN_FOLDER"
"""The folder that a process does not see as the first one does."""
_FAMILIES = ("llama", "olmoe", "qwen2", "qwen3", "qwen3_moe")
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(
    [
        "services.trainer.worker_process",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        *(f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES),
    ]
)


class WarmRank:
    """What a trainer uses of a `subprocess.Popen`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = _forking.Process(target=_serve, args=(dict(environment),))
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a trainer's process", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _serve(environment: Mapping[str, str]) -> None:
    end_with_parent()
    os.environ.update(environment)
    if (hidden := environment.get(HIDDEN)) is not None:
        hide(Path(hidden))
    worker_process.main()
