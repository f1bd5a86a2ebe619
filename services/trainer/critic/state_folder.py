"""The folder of one critic: whose it is, and that no other process works there.

run.json       the run, its instance, and the newest epoch of its trainers
.lock          held by the process that works there
checkpoints/   as a trainer's
journal/       the optimiser steps since the oldest of them
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.config import ConfigError
from penstock.errors import FencedError, RunConflictError, VersionConflictError
from penstock.process.durable_files import replace_file
from services.trainer.checkpoints.checkpoint import CheckpointFormatError

_RUN_FILE, _LOCK_FILE = "run.json", ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A trainer that opens a critic."""

    run_id: str
    instance_id: str
    epoch: int


class StateFolder:
    """The folder at `path`; made if missing."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if another process has it, and OSError."""
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.journal = path / "journal"
        self.owner: Owner | None = None
        """The trainer that has the critic; None until one has opened it in this process."""
        self._lock = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"state_dir: {path}: another critic works there; end it, or name another folder"
            ) from None

    def release(self) -> None:
        """Let another process have it."""
        os.close(self._lock)

    def admit(self, asked: Owner, *, begins: bool) -> None:
        """Let the newest trainer of one run have the critic.

        Args:
            asked: The trainer.
            begins: Whether its run has taken no step.

        Raises:
            RunConflictError: The folder is another run's.
            VersionConflictError: It is nobody's, and the run has taken steps.
            FencedError: A newer trainer has had it.
            CheckpointFormatError, OSError: It cannot be read or written.
        """
        known = self.owner or self._read_owner()
        if known is None and not begins:
            raise VersionConflictError(
                f"state_dir: {self.path} is empty, but the trainer has taken steps: give the critic the state_dir that "
                "it had in this run, or begin another run"
            )
        if known is not None and (known.run_id, known.instance_id) != (asked.run_id, asked.instance_id):
            raise RunConflictError(
                f"state_dir: {self.path} holds the critic of run {known.run_id!r} (instance {known.instance_id}), not "
                f"of {asked.run_id!r} ({asked.instance_id}); start the critic with a folder of its own"
            )
        if known is not None and asked.epoch < known.epoch:
            raise FencedError(f"place.epoch: {asked.epoch}, but a trainer of epoch {known.epoch} has this critic")
        if asked != known:
            replace_file(self.path / _RUN_FILE, json.dumps(asdict(asked)))
        self.owner = asked

    def _read_owner(self) -> Owner | None:
        path = self.path / _RUN_FILE
        try:
            return Owner(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise CheckpointFormatError(f"{path}: cannot be read: {error}") from error
