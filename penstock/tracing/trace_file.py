"""The trace files of a run folder: `traces.jsonl`, then `traces-00002.jsonl` and so on; lines of OTLP's JSON.

All processes of a run on one machine append to the same file, each line by one write at the file's end, which a local
file system keeps whole; a network file system does not across machines, so services elsewhere export instead.

Invariants:
- A file ends once it has `max_bytes`, give or take a line of each process; the `num_files` newest are kept.
- What the disk refuses is counted and dropped. A line that it took in part is ended before the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.tracing.otlp_json import traces_data

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

MAX_BYTES = 32 * 2**20
NUM_FILES = 16
_NAME = re.compile(r"traces(?:-(\d{5}))?\.jsonl")


def trace_files(folder: Path) -> list[Path]:
    """The trace files of a folder, oldest first; none if there is no such folder."""
    found = {path: _NAME.fullmatch(path.name) for path in folder.glob("traces*.jsonl")}
    return sorted((path for path, name in found.items() if name), key=_number)


class TraceFile:
    """Appends to a folder's trace files."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES, num_files: int = NUM_FILES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._num_files = num_files
        self._descriptor: int | None = None
        self._number = 1
        self._is_in_line = False

    def write(self, spans: Sequence[ReadableSpan]) -> None:
        """Append spans as one line. Raises OSError: the disk refuses it."""
        line = f"{traces_data(spans)}\n".encode("utf-8", "backslashreplace")
        descriptor = self._open_current()
        line = b"\n" + line if self._is_in_line else line
        num_written = os.write(descriptor, line)
        self._is_in_line = num_written < len(line)
        if self._is_in_line:
            raise OSError(f"only {num_written} of {len(line)} bytes of a line fit")

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_current(self) -> int:
        """The newest file, or a new one if that is full."""
        if self._descriptor is None:
            self._number = max(map(_number, trace_files(self._folder)), default=1)
        while (descriptor := self._descriptor) is None or os.fstat(descriptor).st_size >= self._max_bytes:
            if descriptor is not None:
                self.close()
                self._number += 1
                self._is_in_line = False
                with contextlib.suppress(FileNotFoundError):
                    self._path(self._number - self._num_files).unlink()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path(self._number), flags, 0o644)
        return descriptor

    def _path(self, number: int) -> Path:
        return self._folder / ("traces.jsonl" if number == 1 else f"traces-{number:05d}.jsonl")


def _number(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    return int(found[1] or 1) if found else 0
