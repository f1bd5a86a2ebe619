"""The folder of one critic: whose it is, and that no other process works there.

run.json       the run, its instance, the newest epoch of its trainers, and which process has the critic
.lock          held by the process that works there
checkpoints/   as a trainer's; in object storage step_N
journal/       the optimiser steps since the oldest of them

With object storage all but the lock, and checkpoints while they are written, is there, and any machine may go on. The
trainer's calls decide which process does: the one that was opened last has the critic, and the others notice that
before they would take a step.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.config import ConfigError
from penstock.errors import FencedError, RunConflictError, VersionConflictError
from penstock.storage.addresses import Address, below
from penstock.storage.storage import Storage
from services.trainer.checkpoints.checkpoint import CheckpointFormatError
from services.trainer.checkpoints.checkpoint_storage import CheckpointStorage
from services.trainer.critic.files import Files, LocalFiles

_RUN_FILE, _LOCK_FILE = "run.json", ".lock"
_HOLDER = "holder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A trainer that opens a critic."""

    run_id: str
    instance_id: str
    epoch: int


class StateFolder:
    """The folder at `path`, made if missing, or what is at `stored` in object storage."""

    def __init__(self, path: Path, stored: Address | None = None) -> None:
        """Raises ConfigError if another process has it, or a package is missing, and OSError."""
        path.mkdir(parents=True, exist_ok=True)
        self.checkpoints = path / "checkpoints"
        self.stored_checkpoints = None if stored is None else CheckpointStorage(stored)
        self.journal: Files = LocalFiles(path / "journal")
        self._files: Files = LocalFiles(path)
        if stored is not None:
            self._files, self.journal = Storage(stored), Storage(below(stored, "journal"))
        self.address = self._files.address
        """Where it is, for messages."""
        self.setting = "state_dir" if stored is None else "checkpoint_storage"
        """What names it."""
        self.owner: Owner | None = None
        """The trainer that has the critic; None until one has opened it in this process."""
        self._holder = uuid.uuid4().hex
        self._is_stored = stored is not None
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

    def check_run(self, run_id: str) -> None:
        """Refuse the folder of another run before anything listens; raises ConfigError.

        What cannot be read now is left to `admit`: a trainer waits until storage is back.
        """
        try:
            known, _ = self._read()
        except (CheckpointFormatError, OSError):
            return
        if known is not None and known.run_id != run_id:
            raise ConfigError(
                f"{self.setting}: {self.address} holds the critic of run {known.run_id!r}, not of {run_id!r}; give "
                "this critic one of its own"
            )

    def is_held(self) -> bool:
        """Whether no process on another machine was opened since. Raises CheckpointFormatError, OSError."""
        return not self._is_stored or self._read()[1] == self._holder

    def admit(self, asked: Owner, *, begins: bool) -> None:
        """Let the newest trainer of one run have the critic, and this process hold it.

        Args:
            asked: The trainer.
            begins: Whether its run has taken no step.

        Raises:
            RunConflictError: The folder is another run's.
            VersionConflictError: It belongs to no run, and the run has taken steps.
            FencedError: A newer trainer has had it.
            CheckpointFormatError, OSError: It cannot be read or written.
        """
        known, holder = self._read()
        if known is None and not begins:
            raise VersionConflictError(
                f"{self.setting}: {self.address} is empty, but the trainer has taken steps: give the critic the "
                f"{self.setting} that it had in this run, or begin another run"
            )
        if known is not None and (known.run_id, known.instance_id) != (asked.run_id, asked.instance_id):
            raise RunConflictError(
                f"{self.setting}: {self.address} holds the critic of run {known.run_id!r} (instance "
                f"{known.instance_id}), not of {asked.run_id!r} ({asked.instance_id}); start the critic with a folder "
                "of its own"
            )
        if known is not None and asked.epoch < known.epoch:
            raise FencedError(f"place.epoch: {asked.epoch}, but a trainer of epoch {known.epoch} has this critic")
        if (asked, self._holder) != (known, holder):
            self._files.write(_RUN_FILE, json.dumps({**asdict(asked), _HOLDER: self._holder}).encode())
        self.owner = asked

    def _read(self) -> tuple[Owner | None, str]:
        """The trainer that has the critic, and the process that holds it."""
        content = self._files.read(_RUN_FILE)
        if content is None:
            return None, ""
        try:
            document = json.loads(content)
            holder = str(document.pop(_HOLDER, ""))
            return Owner(**document), holder
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointFormatError(f"{self.address}/{_RUN_FILE}: cannot be read: {error}") from error
