"""Stores recordings as JSON lines: an object per sample, with arrays as lists and bytes as base64.

Log-probs are written as the shortest decimals that are exact.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np

from console.recording.recorded_sample import RecordingError
from console.recording.row_codec import Row, shortest_decimals

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A sample of a million tokens takes about half of this."""


class JsonLinesWriter:
    """Appends rows; `flush` makes them durable."""

    def __init__(self, path: Path) -> None:
        # Open for the lifetime of the writer.
        self._file: BinaryIO = path.open("ab")
        _cut_torn_line(path)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._file.tell()

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        self._file.write(b"".join(_line(row) for row in rows))

    def flush(self) -> None:
        """Sync everything written to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        self._file.close()


def read_json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    """Every row with its position; an unterminated last line, torn by a crash, is skipped. Raises RecordingError."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise RecordingError(f"{where}: longer than {MAX_LINE_BYTES} bytes; no sample is that long")
            if line.endswith(b"\n") and line.strip():
                yield where, _parsed(where, line)


def _line(row: Row) -> bytes:
    plain = {name: _plain(value) if isinstance(value, (np.ndarray, bytes)) else value for name, value in row.items()}
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _plain(values: np.ndarray | bytes) -> list[float] | list[int] | str:
    if isinstance(values, bytes):
        return base64.b64encode(values).decode()
    if values.dtype == np.float32:
        return shortest_decimals(values)
    numbers: list[int] = values.tolist()
    return numbers


def _parsed(where: str, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise RecordingError(f"{where}: expected one JSON object a line")
    return row


def _cut_torn_line(path: Path) -> None:
    """Remove an unterminated last line: its writer died, and its step is recorded again."""
    if path.stat().st_size > 0:
        with path.open("rb+") as file:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            file.truncate(end)
