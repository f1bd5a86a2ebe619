"""The optimiser steps of a critic on its disk or in object storage, a file each, from which they can be taken again.

    journal/VERSION-MINIBATCH    a serialized CriticRecord; whole, or not there

Invariants:
- A file is stored before the step is confirmed to the trainer.
- The files are those of consecutive steps: each begins where the one before ended.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from google.protobuf.message import DecodeError

from penstock.v1 import critic_pb2
from services.trainer.checkpoints.checkpoint import CheckpointFormatError
from services.trainer.critic.files import Files

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
    """The steps kept in a folder, listed by `refresh`; used by one thread at a time, the only one that writes there."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._positions: list[Position] = []

    def refresh(self) -> None:
        """See what is there. Raises OSError."""
        found = (_NAME.fullmatch(name) for name in self._files.names())
        self._positions = sorted(Position(int(match[1]), int(match[2])) for match in found if match)

    def positions(self) -> list[Position]:
        """Where the kept steps begin, in order."""
        return list(self._positions)

    def append(self, position: Position, record: critic_pb2.CriticRecord) -> None:
        """Keep a step; stored when this returns. Raises OSError, and then keeps nothing of it."""
        self._files.write(_name(position), record.SerializeToString())
        if position not in self._positions:
            self._positions = sorted((*self._positions, position))

    def read(self, position: Position) -> critic_pb2.CriticRecord | None:
        """The step that begins there; None if it is not kept. Raises CheckpointFormatError, OSError."""
        content = self._files.read(_name(position))
        try:
            return None if content is None else critic_pb2.CriticRecord.FromString(content)
        except DecodeError as error:
            raise CheckpointFormatError(f"{self._files.address}/{_name(position)}: damaged: {error}") from error

    def forget_from(self, position: Position) -> None:
        """Delete the steps that begin there or later, the last one first. Raises OSError."""
        for each in reversed(self.positions()):
            if each >= position:
                self._forget(each)

    def forget_before(self, policy_version: int) -> None:
        """Delete the steps of earlier versions, the first one first. Raises OSError."""
        for each in self.positions():
            if each.policy_version < policy_version:
                self._forget(each)

    def _forget(self, position: Position) -> None:
        self._files.delete(_name(position))
        self._positions.remove(position)


def _name(position: Position) -> str:
    return f"{position.policy_version}-{position.minibatch}"
