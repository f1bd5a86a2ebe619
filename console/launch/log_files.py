"""Writes the log of a supervised process: its output comes through a pipe and goes to a file that is rotated by size.

`NAME.log` is the current file; at its size limit it becomes `NAME.log.1`, which becomes `NAME.log.2`, and so on.

Invariants:
- No line is lost or cut by a rotation: the writer does not notice it.
- A full disk costs lines, never the process that writes them: the pipe is always read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

_READ_BYTES = 65536
# A suspended console reads nothing: this much may be written meanwhile before the writer blocks.
_PIPE_BYTES = 2**20


class RotatedLog:
    """A file that is appended to, and rotated when it is full.

    Args:
        path: The file.
        max_bytes: Its size limit; a longer line is written whole.
        num_files: Files kept, including this one: at least 2.
    """

    def __init__(self, path: Path, *, max_bytes: int, num_files: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_files = num_files
        self._descriptor: int | None = None
        self._num_bytes = 0
        self._is_in_line = False

    def open(self) -> None:
        """Create the file if it does not exist. Raises OSError."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._num_bytes = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Append `data`. Raises OSError if the disk refuses it; the unwritten part is lost."""
        for line in data.splitlines(keepends=True):
            if not self._is_in_line and self._num_bytes > 0 and self._num_bytes + len(line) > self._max_bytes:
                self._rotate()
            self._is_in_line = True
            self._append(line)
            self._is_in_line = not line.endswith((b"\n", b"\r"))

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: bytes) -> None:
        self.open()
        assert self._descriptor is not None
        while line:
            num_written = os.write(self._descriptor, line)
            self._num_bytes += num_written
            line = line[num_written:]

    def _rotate(self) -> None:
        self.close()
        names = [self._path, *(Path(f"{self._path}.{index}") for index in range(1, self._num_files))]
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._num_bytes = 0


class LogPump:
    """Copies a process's output to its log, in a separate thread, until every writer has closed the pipe.

    Args:
        log: The log to write to.
        on_refusal: Called in that thread for the first of consecutive lines that the disk refuses.
    """

    def __init__(self, log: RotatedLog, *, on_refusal: Callable[[OSError], None]) -> None:
        self._log = log
        self._on_refusal = on_refusal
        self._reading, self.writing_end = os.pipe()
        """Descriptor that the process writes to; `start` closes this process's copy."""
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._thread = threading.Thread(target=self._carry, name="log-pump", daemon=True)

    def start(self) -> None:
        """Start the thread, once the process has its end of the pipe."""
        os.close(self.writing_end)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all output is in the file, if every writer ends in time."""
        self._thread.join(timeout_s)

    def _carry(self) -> None:
        num_lost = 0
        try:
            while data := os.read(self._reading, _READ_BYTES):
                try:
                    if num_lost:
                        self._log.write(f"\npenstock: up to {num_lost} bytes of this log were lost: no room\n".encode())
                        num_lost = 0
                    self._log.write(data)
                except OSError as error:
                    if not num_lost:
                        self._on_refusal(error)
                    num_lost += len(data)
        finally:
            os.close(self._reading)
            self._log.close()
