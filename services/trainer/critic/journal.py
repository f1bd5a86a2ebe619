"""The optimiser steps of a critic on its disk, a file each, from which they can be taken again.

    journal/VERSION-MINIBATCH    a serialized CriticRecord; whole, or not there

Invariants:
- A file is on the disk before the step is confirmed to the trainer.
- The files are those of consecutive steps: each begins where the one before ended.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from penstock.process.durable_files import sync_folder
from penstock.v1 import critic_pb2
from services.trainer.checkpoints.checkpoint import CheckpointFormatError

_NAME = re.compile(r"(\d+)-(\d+)")


class Position(NamedTuple):
    """Where a critic is: before a minibatch of the step from a version."""

    policy_version: int
    minibatch: int

    def after(self, *, is_last: bool) -> Position:
        """The position after the optimiser step."""
        return Position(self.policy_version + 1, 0) if is_last else Position(self.policy_version, self.minibatch + 1)

    def __str__(self) -> str:
        """For messages."""
        return f"version {self.policy_version}" + (f", minibatch {self.minibatch}" if self.minibatch else "")


class Journal:
    """The steps kept in a folder; used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def positions(self) -> list[Position]:
        """Where the kept steps begin, in order."""
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(Position(int(match[1]), int(match[2])) for match in found if match)

    def append(self, position: Position, record: critic_pb2.CriticRecord) -> None:
        """Keep a step; on the disk when this returns. Raises OSError, and then keeps nothing of it."""
        path = self._path(position)
        temporary = path.with_name(f".{path.name}")
        try:
            with temporary.open("wb") as file:
                file.write(record.SerializeToString())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self._folder)

    def read(self, position: Position) -> critic_pb2.CriticRecord | None:
        """The step that begins there; None if it is not kept. Raises CheckpointFormatError, OSError."""
        path = self._path(position)
        try:
            return critic_pb2.CriticRecord.FromString(path.read_bytes())
        except FileNotFoundError:
            return None
        except DecodeError as error:
            raise CheckpointFormatError(f"{path}: damaged: {error}") from error

    def forget_from(self, position: Position) -> None:
        """Delete the steps that begin there or later, the last one first."""
        for each in reversed(self.positions()):
            if each >= position:
                self._path(each).unlink()
        sync_folder(self._folder)

    def forget_before(self, policy_version: int) -> None:
        """Delete the steps of earlier versions, the first one first."""
        for each in self.positions():
            if each.policy_version < policy_version:
                self._path(each).unlink()

    def _path(self, position: Position) -> Path:
        return self._folder / f"{position.policy_version}-{position.minibatch}"
