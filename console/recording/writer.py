"""Writes a recording.

    open_writer(path) -> write ... end_step ... write ... end_step -> close

A file that is written in one go appears under its name, complete, when it is closed. A followed recording is appended
to as JSON lines, each step on the disk before the next begins; as parquet it appears when it is closed, since a parquet
file is readable only then. With a size limit, a followed recording continues in another file (`parts`) when a step
begins beyond it.

Each step is recorded once: if the step under way is sent again from its beginning (a lost stream, another recorder),
its samples already written are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from console.recording.jsonl import JsonLinesWriter
from console.recording.parts import part_path, parts_of
from console.recording.reader import check_suffix, last_step, read_part
from console.recording.recorded_sample import Recorded, RecordingError, Step
from console.recording.row_codec import to_row
from penstock.process.durable_files import sync_file

if TYPE_CHECKING:
    from console.recording.parquet import ParquetWriter


class RecordingWriter:
    """Made by `open_writer`. Its methods block on file work: do not call them on an event loop."""

    def __init__(self, path: Path, *, is_followed: bool, max_bytes: int | None) -> None:
        self.path = path
        self._is_followed, self._max_bytes = is_followed, max_bytes
        self._part = max(1, len(parts_of(path))) if is_followed else 1
        self._rows, self._beside = self._opened()
        self._step, self._seen = last_step(self._target) if self._target.exists() else (None, set())

    def write(self, samples: Sequence[Recorded]) -> None:
        """Add samples; those of one group and of one step are adjacent. Samples already written are skipped."""
        for step, members in groupby(samples, key=lambda sample: sample.step):
            if step != self._step:
                self._begin(step)
            fresh = [sample for sample in members if sample.position not in self._seen]
            self._rows.write([to_row(sample) for sample in fresh])
            self._seen.update(sample.position for sample in fresh)

    def _begin(self, step: Step) -> None:
        """Begin another step, in another file if this one is full."""
        is_full = self._max_bytes is not None and self._rows.size_bytes >= self._max_bytes
        if is_full and self._step is not None:
            self.close()
            self._part += 1
            self._rows, self._beside = self._opened()
        self._step, self._seen = step, set()

    def end_step(self) -> None:
        """End a step: followed JSON lines are on the disk from now on."""
        self._rows.flush()

    def close(self) -> None:
        """Complete the file and rename it into place."""
        self._rows.close()
        if self._beside != self._target:
            sync_file(self._beside)
            self._beside.replace(self._target)

    def discard(self) -> None:
        """Discard a file that is written in one go; one that was appended to stays as it is."""
        self._rows.close()
        if self._beside != self._target:
            self._beside.unlink(missing_ok=True)

    @property
    def _target(self) -> Path:
        return part_path(self.path, self._part)

    def _opened(self) -> tuple[JsonLinesWriter | ParquetWriter, Path]:
        """The part's writer, and the file it writes to."""
        target = self._target
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        if target.suffix == ".jsonl":
            beside = target if self._is_followed else beside
            return JsonLinesWriter(beside), beside
        # pyarrow takes a quarter of a second and 50 MiB to import; JSON lines do not need it.
        from console.recording.parquet import ParquetWriter

        rows = ParquetWriter(beside)
        if target.exists():
            for _, row in read_part(target):
                rows.write([row])
        return rows, beside


def open_writer(path: Path, *, is_followed: bool = False, max_bytes: int | None = None) -> RecordingWriter:
    """Open a writer by the file's suffix. With `is_followed`, an existing recording is continued.

    Args:
        path: The recording's first file.
        is_followed: Whether it is written step by step.
        max_bytes: If followed: a step that begins beyond this size begins another file.

    Raises:
        RecordingError: The file exists already, cannot be written, or its suffix names no format.
    """
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not is_followed:
        raise RecordingError(f"{path}: exists already; remove it, or name another file")
    second = part_path(path, 2)
    if second.exists() and not path.exists():
        raise RecordingError(
            f"{second}: is left of another recording; remove it, or name another file than {path.name}"
        )
    try:
        return RecordingWriter(path, is_followed=is_followed, max_bytes=max_bytes if is_followed else None)
    except OSError as error:
        raise RecordingError(f"{path}: cannot be written: {error.strerror}") from error
