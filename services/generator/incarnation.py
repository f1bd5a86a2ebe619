"""Tells which process of a generator this is, and which one it takes the place of.

A killed process cannot give its leases back. The next one of its name, in the same folder, says for certain that it has
ended: each holds a lock on a file there, which the system releases with the process, and the file names who held it.
"""

from __future__ import annotations

import fcntl
import uuid
from io import TextIOWrapper
from pathlib import Path

import structlog

_FILE = "incarnation"

_log = structlog.get_logger()


class Incarnation:
    """One process of a generator.

    Args:
        name: The generator's, kept across restarts.
        folder: Its own; created if missing.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.generator_id = f"{name}-{uuid.uuid4().hex[:8]}"
        """Names this process alone."""
        self.predecessor = ""
        """The last one before, which has ended; empty if none is known."""
        self._path = folder / _FILE
        self._file: TextIOWrapper | None = None

    def begin(self) -> None:
        """Take the place of the process before, unless it lives: then this one is another generator of that name."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("a+", encoding="utf-8")
        except OSError as error:
            _log.warning("a former process is not known", path=str(self._path), error=str(error))
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            self.predecessor = file.read().strip()
            file.truncate(0)
            file.write(self.generator_id)
            file.flush()
        except (OSError, UnicodeDecodeError) as error:
            file.close()
            _log.warning("a former process is not known", path=str(self._path), error=str(error))
            return
        self._file = file

    def end(self) -> None:
        """The process ends."""
        if self._file is not None:
            self._file.close()
            self._file = None
