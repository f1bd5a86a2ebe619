"""Implements `penstock ps`, `logs` and `stop` for local runs, from the records in their folders."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from console.config.run_folder import CONSOLE_NAME, RunFolder, open_folder
from console.view.formats import plain_console, plain_table
from penstock.config import ConfigError
from penstock.process.grace_periods import STOP_GRACE_S

STOP_WAIT_S = STOP_GRACE_S["run"]
_POLL_S = 0.2
_MAX_TAIL_BYTES = 4 * 1024 * 1024


def run_folders(runs_dir: Path) -> list[RunFolder]:
    """The run folders in a folder, oldest first."""
    found = sorted(runs_dir.expanduser().glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    return [RunFolder(path.parent.absolute()) for path in found]


def ps_command(runs_dir: Path) -> int:
    """Print the live processes of every run in a folder; returns the exit status."""
    rows = [
        (folder.path.name, record.name, record.pid, record.state, record.address or "-", record.num_restarts)
        for folder in run_folders(runs_dir)
        for record in folder.records()
        if record.is_alive
    ]
    if rows:
        plain_console().print(plain_table(("run", "service", "process", "state", "address", "restarts"), rows))
    else:
        print(f"no run in {runs_dir} is under way")
    return 0


def logs_command(run_dir: Path, service: str | None, *, follow: bool, num_lines: int) -> int:
    """Print the last lines of a run's logs; with `follow`, continue until interrupted. Returns the exit status."""
    folder = open_folder(run_dir)
    paths = sorted(folder.logs.glob("*.log"))
    if service is not None:
        names = [path.stem for path in paths]
        if service not in names:
            raise ConfigError(f"{service!r}: no such log in {folder.logs}; there are {', '.join(names) or 'none'}")
        paths = [folder.log_of(service)]
    offsets = {path: path.stat().st_size for path in paths}
    for path in paths:
        for line in _tail(path, end=offsets[path], num_lines=num_lines):
            _print(path, line, is_only=service is not None)
    while follow:
        for path in paths:
            for line in _grown(path, offsets):
                _print(path, line, is_only=service is not None)
        time.sleep(_POLL_S)
    return 0


def stop_command(run_dir: Path) -> int:
    """Stop a run and wait until its processes are gone; returns the exit status. Raises ConfigError."""
    folder = open_folder(run_dir)
    alive = [record for record in folder.records() if record.is_alive]
    if not alive:
        print(f"{folder.path.name} is not under way")
        return 0
    leaders = [record for record in alive if record.name == CONSOLE_NAME]
    # Without their launcher the services end by themselves; this only speeds it up.
    for record in leaders or alive:
        os.kill(record.pid, signal.SIGINT if leaders else signal.SIGTERM)
    print(f"stopping {folder.path.name}: a checkpoint is written first")
    deadline_s = time.monotonic() + STOP_WAIT_S
    while time.monotonic() < deadline_s:
        if not any(record.is_alive for record in alive):
            print(f"stopped; continue with: penstock run --resume {folder.path}")
            return 0
        time.sleep(_POLL_S)
    left = ", ".join(f"{record.name} (process {record.pid})" for record in alive if record.is_alive)
    raise ConfigError(f"{folder.path}: still running after {STOP_WAIT_S:g} s: {left}")


def _tail(path: Path, *, end: int, num_lines: int) -> list[str]:
    with path.open("rb") as log:
        log.seek(max(0, end - _MAX_TAIL_BYTES))
        text = log.read(min(end, _MAX_TAIL_BYTES)).decode("utf-8", errors="replace")
    return text.splitlines()[-num_lines:]


def _grown(path: Path, offsets: dict[Path, int]) -> Iterator[str]:
    with path.open("rb") as log:
        log.seek(offsets[path])
        for line in log:
            if not line.endswith(b"\n"):
                break
            offsets[path] += len(line)
            yield line.decode("utf-8", errors="replace").rstrip("\n")


def _print(path: Path, line: str, *, is_only: bool) -> None:
    print(line if is_only else f"{path.stem}: {line}", flush=True)
