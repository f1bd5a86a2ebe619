"""`penstock node` as a process: a machine of a plan, with everything that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from console.config.run_folder import RunFolder
from quickstart.prepare import Prepared
from tests.e2e.runs import RUN_ID
from tests.helpers.console import COMMAND, environment


class Machine:
    """A `penstock node` process, its generators with it."""

    def __init__(self, name: str, document: Mapping[str, Any], folder: Path, *options: str) -> None:
        self.name, self.folder = name, RunFolder(folder / name)
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        with (folder / f"{name}.log").open("wb") as log:
            command = (*COMMAND, "node", str(path), *options)
            self.process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)

    def die(self) -> None:
        """kill -9 of everything on it."""
        self.process.kill()
        for record in self.folder.records():
            if record.is_alive:
                os.killpg(record.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


@contextmanager
def machine(
    name: str,
    addresses: Mapping[str, str],
    task: Prepared,
    folder: Path,
    *,
    gpu: str = "L4",
    emulated: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Machine]:
    """A machine with emulated GPUs of a kind, three times as fast as these; `settings` are more keys of its file."""
    document = {
        "node_id": name,
        "gpu": gpu,
        "scheduler": addresses["scheduler"],
        "dir": str(folder / name),
        "generator": {
            "listen": "127.0.0.1:0",
            "run_id": RUN_ID,
            "broker": addresses["broker"],
            "weights": addresses["trainer"],
            "model_path": str(task.model_dir),
            "cache_dir": str(folder / name / "cache"),
            "engine": {"engine": "emulated", "max_context_tokens": 192},
            "emulated": {"gpu": gpu, "time_scale": 3, **(emulated or {})},
        },
        **settings,
    }
    with started(name, document, folder) as one:
        yield one


@contextmanager
def started(name: str, document: Mapping[str, Any], folder: Path, *options: str) -> Iterator[Machine]:
    """A machine of this file, with options of the command."""
    one = Machine(name, document, folder, *options)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(timeout=60)
