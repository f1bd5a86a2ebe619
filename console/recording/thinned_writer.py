"""Writes a followed recording that stays below a size: when it is full, every second step of its older half goes.

The first step stays, the newest ones are whole, and in between fewer remain the older they are. It is a recording like
any other, but for the gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from console.recording.jsonl import MAX_LINE_BYTES
from console.recording.recorded_sample import Recorded, Step
from console.recording.row_codec import step_of
from console.recording.writer import RecordingWriter

FULL_TO = 0.75
"""Part of the size that a full file is thinned to."""
MAX_STEP_SHARE = 1 / 64
"""Part of the size that a step may take: when it has taken that, its further groups are left out."""
_Extent = tuple[int, int]


class ThinnedWriter(RecordingWriter):
    """Of JSON lines; see `open_writer` for what it does besides.

    Args:
        path: The file; an existing one is continued.
        max_bytes: Its size; a single large step may exceed it.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        super().__init__(path, is_followed=True, max_bytes=None)
        self._most = max_bytes
        self._begun_at = self._rows.size_bytes
        self._is_in: Step | None = None

    def write(self, samples: Sequence[Recorded]) -> None:
        """Add samples of one group, unless their step is large enough already."""
        if not samples:
            return
        if samples[0].step != self._is_in:
            self._is_in, self._begun_at = samples[0].step, self._rows.size_bytes
        if self._rows.size_bytes - self._begun_at <= MAX_STEP_SHARE * self._most:
            super().write(samples)

    def end_step(self) -> None:
        """End a step, and make room if the file is full."""
        super().end_step()
        if self._rows.size_bytes > self._most:
            self._rows.close()
            thin(self.path, to_bytes=int(FULL_TO * self._most))
            self._rows, self._beside = self._opened()


def thin(path: Path, *, to_bytes: int) -> None:
    """Cut a recording of JSON lines down to about so many bytes, in one step for readers. Raises OSError."""
    kept = chosen(_steps(path), to_bytes=to_bytes)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with path.open("rb") as old, beside.open("wb") as new:
        for begin, end in kept:
            old.seek(begin)
            new.write(old.read(end - begin))
        new.flush()
        os.fsync(new.fileno())
    beside.replace(path)


def chosen(steps: Sequence[_Extent], *, to_bytes: int) -> list[_Extent]:
    """The steps that stay, of steps from byte to byte in order: fewer the older they are, and always the newest."""
    kept = list(steps)
    while sum(end - begin for begin, end in kept) > to_bytes and len(kept) > 1:
        half = len(kept) // 2
        # Of two or three steps the one before the newest goes first.
        kept = [*kept[:half:2], *kept[half:]] if half > 1 else [*kept[:-2], kept[-1]]
    return kept


def _steps(path: Path) -> list[_Extent]:
    """From where to where the lines of each step are; damaged lines belong to none."""
    found: list[_Extent] = []
    last: Step | None = None
    with path.open("rb") as file:
        end = 0
        while line := file.readline(MAX_LINE_BYTES):
            begin, end = end, end + len(line)
            try:
                step = step_of(json.loads(line), where=str(path))
            except (ValueError, RecursionError, TypeError):
                last = None
                continue
            if step == last:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
            last = step
    return found
