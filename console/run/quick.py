"""Prepares the quick start: its configuration, and its task, made (or found) by a separate process.

A separate process, because making the task needs torch, and the console that follows the run should stay small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from console.config.config import RunConfig, parse_run_config
from console.launch.supervisor import service_environment
from penstock.config import ConfigError, apply_overrides, read_document

CONFIG_FILE = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
_PREPARE_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prepared task."""

    model_dir: Path
    """Hugging Face directory of the warm-started model."""
    train_path: Path
    """Training rows."""
    eval_path: Path
    """Held-out rows."""


def quickstart_config(overrides: list[str], *, seed: int, directory: Path, task: Task | None) -> RunConfig:
    """The run's configuration. Without a task its paths stay as in the example file. Raises ConfigError."""
    document = read_document(CONFIG_FILE)
    settings = [f"run.seed={seed}", f"run.dir={json.dumps(str(directory))}"]
    if task is not None:
        settings += [
            f"run.id=quickstart-{seed}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}",
            f"model.path={json.dumps(str(task.model_dir))}",
            f"data.train={json.dumps(str(task.train_path))}",
            f"data.eval={json.dumps(str(task.eval_path))}",
        ]
    return parse_run_config(apply_overrides(document, [*settings, *overrides]), source="quickstart")


def prepare_task(directory: Path, *, seed: int, is_stdout_free: bool = True) -> Task:
    """Make the task in `directory`, or find it there. Raises ConfigError if that fails.

    Progress goes to stdout, or to stderr if stdout is needed for output.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir: {directory.parent}: {error.strerror}; name a folder that can be made") from error
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        answer = Path(scratch) / "task.json"
        environment = service_environment(os.environ, num_threads=os.cpu_count() or 1)
        arguments = ("-m", "quickstart", str(directory), str(seed), str(answer))
        try:
            subprocess.run(
                (sys.executable, "-P", *arguments),
                stdout=None if is_stdout_free else sys.stderr,
                env=environment,
                timeout=_PREPARE_TIMEOUT_S,
                check=True,
            )
            paths = json.loads(answer.read_text(encoding="utf-8"))
        except subprocess.CalledProcessError as error:
            raise ConfigError(
                f"quickstart: making the task in {directory} failed with status {error.returncode}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"quickstart: making the task took longer than {_PREPARE_TIMEOUT_S:g} s") from error
    task = Task(**{name: Path(path) for name, path in paths.items()})
    _point_at(directory / "current", task.model_dir.parent)
    return task


def _point_at(link: Path, folder: Path) -> None:
    # The example file refers to the task by this link, so that it can also be run by itself.
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.symlink_to(folder.name, target_is_directory=True)
    beside.replace(link)
