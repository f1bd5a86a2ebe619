"""Lists the certificates that an authority has issued, one JSON object per line, in its folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from console.certs.atomic_files import named_errors

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
    """The folder that it was written to."""

    def left_s(self, now: datetime) -> float:
        """Seconds until it expires; negative once it has."""
        return (self.not_after - now).total_seconds()


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of an index, oldest first."""

    issued: tuple[Issued, ...]
    num_unreadable: int
    """Malformed lines, such as one cut short by a full disk or a power failure."""


class Index:
    """The list of an authority, written by one process at a time; others wait."""

    def __init__(self, authority: Path) -> None:
        self._path = authority / INDEX_FILE

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock out other writers of this list and of the folders in it. Raises ConfigError."""
        with contextlib.ExitStack() as stack:
            with named_errors(self._path, "locked"):
                file = stack.enter_context(self._path.open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def append(self, issued: Issued) -> None:
        """Append a line atomically. Raises ConfigError."""
        with named_errors(self._path, "written"), self._path.open("ab+", buffering=0) as file:
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
        """The issued certificates; empty if there is no list yet. Raises ConfigError."""
        issued, num_unreadable = [], 0
        with named_errors(self._path, "read"), contextlib.suppress(FileNotFoundError):
            for line in self._path.read_bytes().splitlines():
                try:
                    issued.append(Issued.model_validate_json(line))
                except ValidationError:
                    num_unreadable += bool(line.strip())
        return Listing(tuple(issued), num_unreadable)
