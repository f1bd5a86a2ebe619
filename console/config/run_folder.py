"""Defines the layout of a run's folder, and the small JSON files that record the run's processes.

    config.yaml metrics.jsonl summary.json report.html checkpoints/   configuration and results
    trajectories.jsonl     the trained samples, with `record`
    samples.jsonl          without it a few of them, for the page
    traces.jsonl           spans; traces-00002.jsonl ... are newer (docs/tracing.md)
    logprob_gaps.jsonl     the trainer's log-probs of their tokens, less the engines'
    plans.jsonl            every plan followed, with `scheduler.problem`
    devices.json           GPUs of this machine that the run computes on
    console.lock           locked by the console that uses the folder (`console.config.folder_lock`)
    services/<name>.yaml   configuration of a service started here
    services/<name>.json   its process: id, address, restarts (read by ps, status, stop)
    logs/<name>.log        its log; .log.1, .log.2 ... are older
    redis/                 the embedded Redis' append-only files
    cache/<name>/          weights fetched by a generator
    critic/                checkpoints and steps of a critic started here
    lengths/               length forecasts learned by a scheduler started here

Every file is replaced atomically (a temporary file is renamed), so a reader never sees half of one.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.config import ConfigError
from penstock.process.durable_files import replace_file

CONSOLE_NAME = "console"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A process of a run on this machine."""

    name: str
    """`broker`, `generator-0` ...; the launcher itself is `console`."""
    pid: int
    """Its process id."""
    started_ticks: int
    """Start time by the kernel, in clock ticks since boot; with the pid it identifies a process uniquely."""
    state: str
    """starting, ready, restarting, paused, stopped or failed."""
    address: str = ""
    """host:port it serves; empty if it serves none."""
    metrics: str = ""
    """host:port of its metrics; empty if it serves none."""
    num_restarts: int = 0
    """Restarts so far."""
    why: str = ""
    """If paused or failed: how it ended, and when it is tried again."""
    since_s: float = 0.0
    """When it entered its state, Unix seconds; 0 if unknown."""

    @property
    def is_alive(self) -> bool:
        """Whether this same process still runs."""
        return started_ticks_of(self.pid) == self.started_ticks


class RunFolder:
    """Paths in one run's folder, and its process records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.plans = path / "plans.jsonl"
        self.devices = path / "devices.json"
        self.checkpoints = path / "checkpoints"
        self.services = path / "services"
        self.logs = path / "logs"
        self.redis = path / "redis"
        self.cache = path / "cache"
        self.lengths = path / "lengths"
        self.critic = path / "critic"

    def create(self) -> None:
        """Make the folder and its subfolders; existing content stays."""
        for part in (self.path, self.services, self.logs):
            part.mkdir(parents=True, exist_ok=True)
        # Service configurations may name a Redis password.
        self.services.chmod(0o700)

    def log_of(self, name: str) -> Path:
        """The log file of a process."""
        return self.logs / f"{name}.log"

    def write_record(self, record: ProcessRecord) -> None:
        """Record a process."""
        replace_file(self.services / f"{record.name}.json", json.dumps(asdict(record), indent=2) + "\n")

    def records(self) -> list[ProcessRecord]:
        """The recorded processes, by name; unreadable records are left out."""
        found = (read_record(path) for path in sorted(self.services.glob("*.json")))
        return [record for record in found if record is not None]


def read_record(path: Path) -> ProcessRecord | None:
    """The record in a file, or None if it is missing or unreadable."""
    try:
        record = ProcessRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    texts = (record.name, record.state, record.address, record.metrics, record.why)
    numbers = (record.pid, record.num_restarts)
    is_sound = all(isinstance(each, str) for each in texts) and all(isinstance(each, int) for each in numbers)
    return record if is_sound and isinstance(record.since_s, int | float) and math.isfinite(record.since_s) else None


def open_folder(path: Path) -> RunFolder:
    """Open the folder of an existing run. Raises ConfigError if there is none."""
    folder = RunFolder(path.expanduser().absolute())
    try:
        is_run = folder.config.is_file()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a run folder") from error
    if not is_run:
        raise ConfigError(f"{path}: not a run folder (it holds no config.yaml)")
    return folder


def is_there(path: Path) -> bool:
    """Whether a path exists, as far as one may look; where one may not, pathlib raises."""
    try:
        return path.exists()
    except OSError:
        return False


def started_ticks_of(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it is gone, 0 if the system does not report it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
