"""Tells which process of a generator this is, and which one it takes the place of.

A killed process cannot give its leases back. The next one of its name, in the same folder, says for certain that it has
ended: each holds a lock on a file there, which the system releases with the process, and the file names who held it.

A lock (flock) holds for certain among the processes of one kernel, containers included. On a folder that machines share
it may not: some network file systems, and mounts with `nolock` or `local_lock`, keep it on each machine. So the file
also names the kernel, and a process of another one is never said to have ended: its leases run out instead.
"""

from __future__ import annotations

import fcntl
import uuid
from io import TextIOWrapper
from pathlib import Path

import structlog

_FILE = "incarnation"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

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
        self._kernel = kernel_id()
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
            name, _, kernel = file.read().strip().partition(" ")
            if self._kernel and kernel == self._kernel:
                self.predecessor = name
            elif name:
                _log.warning("a former process ran elsewhere: its leases run out first", former=name)
            file.truncate(0)
            file.write(f"{self.generator_id} {self._kernel}")
            file.flush()
        except BlockingIOError:
            file.close()
            _log.warning(
                "another process of this generator lives: give each a generator_id, or a cache_dir, of its own",
                path=str(self._path),
            )
            return
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


def kernel_id() -> str:
    """Names the running kernel, of this machine since it was started; empty where that is not known."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
