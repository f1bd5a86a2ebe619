"""Writing a recording.

    open_writer(path) -> write ... end_step ... write ... end_step -> close

A file that is written in one go appears whole, under its name, when it is closed. One that is followed step by step is
appended to as JSON lines, each step on the disk before the next begins; as parquet it appears when it is closed, since
a parquet file is readable only then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from console.recording.jsonl import JsonLinesWriter
from console.recording.reader import check_suffix, read_rows
from console.recording.rows import Row, to_row
from console.recording.sample import Recorded, RecordingError


class _RowWriter(Protocol):
    def write(self, rows: Sequence[Row]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class RecordingWriter:
    """Made by `open_writer`. Its calls do file work: keep them off an event loop that must not wait."""

    def __init__(self, path: Path, *, beside: Path, rows: _RowWriter) -> None:
        self.path = path
        self.num_samples = 0
        """Samples written by this writer."""
        self._beside = beside
        self._rows = rows

    def write(self, samples: Sequence[Recorded]) -> None:
        """Add samples; those of one group and of one step stand together."""
        self._rows.write([to_row(sample) for sample in samples])
        self.num_samples += len(samples)

    def end_step(self) -> None:
        """A step is complete: JSON lines that are followed are on the disk from now on."""
        self._rows.flush()

    def close(self) -> None:
        """Complete the file and give it its name."""
        self._rows.close()
        if self._beside != self.path:
            _sync(self._beside)
            self._beside.replace(self.path)

    def discard(self) -> None:
        """Forget a file that is written in one go; one that was appended to stays as far as it got."""
        self._rows.close()
        if self._beside != self.path:
            self._beside.unlink(missing_ok=True)


def open_writer(path: Path, *, is_followed: bool = False) -> RecordingWriter:
    """A writer by the file's suffix. With `is_followed` an existing recording is gone on with.

    Raises:
        RecordingError: The file is there already, cannot be written, or has a name that says nothing of its format.
    """
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not is_followed:
        raise RecordingError(f"{path}: exists already; remove it, or name another file")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".jsonl":
            target = path if is_followed else beside
            return RecordingWriter(path, beside=target, rows=JsonLinesWriter(target))
        # pyarrow takes a quarter of a second to import and 50 MiB; JSON lines do without.
        from console.recording.parquet import ParquetWriter

        rows = ParquetWriter(beside)
        if path.exists():
            for _, row in read_rows(path):
                rows.write([row])
        return RecordingWriter(path, beside=beside, rows=rows)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be written: {error.strerror}") from error


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
