"""What an authority has issued: one JSON object a line, in its folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from console.certs.atomic_files import told

INDEX_FILE = "issued.jsonl"


class Issued(BaseModel):
    """A certificate that was signed."""

    model_config = ConfigDict(frozen=True)

    serial: str
    """Serial number, hexadecimal."""
    name: str
    roles: tuple[str, ...]
    run: str
    site: str
    hosts: tuple[str, ...]
    not_before: AwareDatetime
    not_after: AwareDatetime
    folder: str
    """Where it was written to."""

    def left_s(self, now: datetime) -> float:
        """Seconds until it ends; negative when it has."""
        return (self.not_after - now).total_seconds()


@dataclass(frozen=True, slots=True)
class Listing:
    """What an index holds, oldest first."""

    issued: tuple[Issued, ...]
    num_unreadable: int
    """Lines that are no certificate's, such as one that a full disk or a power failure cut off."""


class Index:
    """The list of an authority; one writer at a time, others wait."""

    def __init__(self, authority: Path) -> None:
        self._path = authority / INDEX_FILE

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers out, of this list and of the folders it tells of. Raises ConfigError."""
        with contextlib.ExitStack() as stack:
            with told(self._path, "locked"):
                file = stack.enter_context(self._path.open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def append(self, issued: Issued) -> None:
        """Add a line, whole or not at all. Raises ConfigError."""
        with told(self._path, "written"), self._path.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            line = issued.model_dump_json().encode() + b"\n"
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = b"\n" + line
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise

    def read(self) -> Listing:
        """What was issued; none where the list is not there yet. Raises ConfigError."""
        issued, num_unreadable = [], 0
        with told(self._path, "read"), contextlib.suppress(FileNotFoundError):
            for line in self._path.read_bytes().splitlines():
                try:
                    issued.append(Issued.model_validate_json(line))
                except ValidationError:
                    num_unreadable += bool(line.strip())
        return Listing(tuple(issued), num_unreadable)
