"""Reads the whole lines of a file that grows, from where the last reading ended; a replaced file is read again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SKIPPED_BYTES = 1024 * 1024


class GrowingFile:
    """One file of lines.

    Args:
        path: It need not exist yet.
        max_line_bytes: Longer lines are passed over: they are never held in memory.
    """

    def __init__(self, path: Path, *, max_line_bytes: int) -> None:
        self.path = path
        self.offset = 0
        """End of what was read, bytes."""
        self.size = 0
        """Of the file when it was last looked at, bytes."""
        self.generation = 0
        """Raised whenever the file was replaced or cut, so that everything read before is void."""
        self._max_line_bytes = max_line_bytes
        self._identity: tuple[int, int] | None = None

    def has_changed(self) -> bool:
        """Look at the file, and start at its beginning if it is another one; whether anything is to be read."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        self._take(found)
        return self.size > self.offset

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Offset and content of each new whole line; an unterminated last one is left for later."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            self._take(os.fstat(file.fileno()))
            file.seek(self.offset)
            while line := file.readline(self._max_line_bytes + 1):
                begin = self.offset
                if len(line) > self._max_line_bytes:
                    num_skipped = _skip_line(file)
                    if not num_skipped:
                        return
                    self.offset += len(line) + num_skipped
                    continue
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield begin, line

    def _take(self, found: os.stat_result) -> None:
        identity = (found.st_dev, found.st_ino)
        if self._identity not in (None, identity) or found.st_size < self.offset:
            self.offset = 0
            self.generation += 1
        self._identity, self.size = identity, found.st_size


def _skip_line(file: BinaryIO) -> int:
    """Bytes to the end of the line; 0 if it has not ended yet."""
    num_bytes = 0
    while piece := file.readline(_SKIPPED_BYTES):
        num_bytes += len(piece)
        if piece.endswith(b"\n"):
            return num_bytes
    return 0
