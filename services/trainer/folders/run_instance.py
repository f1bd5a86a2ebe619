"""Which run a folder holds: an identity beside the id that a person chose.

Promises:
- A run's instance is on disk before the broker learns of it, so a trainer that dies before its first checkpoint and
  restarts is recognised as the same run.
- The folder also records the newest epoch under which one of its trainers took over the run.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.process.durable_files import replace_file
from services.trainer.checkpoints.checkpoint import CheckpointFormatError

INSTANCE_FILE = "instance.json"
MAX_FILE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInstance:
    """A run, and its trainers so far."""

    instance_id: str
    """Random; empty in a run from before there were instances."""
    epoch: int = 0
    """The newest epoch known here; 0 before the first take-over."""


def new_instance() -> RunInstance:
    """A new run."""
    return RunInstance(instance_id=secrets.token_hex(8))


def new_owner_id() -> str:
    """Names a trainer process' ownership of one run, readably: host, process, random part."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"


def read_instance(run_dir: Path) -> RunInstance | None:
    """The folder's record, or None. Raises CheckpointFormatError."""
    path = run_dir / INSTANCE_FILE
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointFormatError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
        return RunInstance(instance_id=str(document["instance_id"]), epoch=int(document["epoch"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointFormatError(f"{path}: cannot be read: {error!r}") from error


def write_instance(run_dir: Path, instance: RunInstance) -> None:
    """Replace the folder's record and sync it to disk. Raises OSError."""
    replace_file(run_dir / INSTANCE_FILE, json.dumps(asdict(instance)))
