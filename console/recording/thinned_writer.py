"""Writes a followed recording that stays below a size (`penstock.process.thinned_file`).

It is a recording like any other, but for the gaps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from console.recording.jsonl import MAX_LINE_BYTES
from console.recording.recorded_sample import Recorded, Step
from console.recording.row_codec import step_of
from console.recording.writer import RecordingWriter
from penstock.process.thinned_file import FULL_TO, thin

MAX_STEP_SHARE = 1 / 64
"""Part of the size that a step may take: when it has taken that, its further groups are left out."""


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
            thin(self.path, to_bytes=int(FULL_TO * self._most), step_of=_step_of, max_line_bytes=MAX_LINE_BYTES)
            self._rows, self._beside = self._opened()


def _step_of(line: bytes) -> Step | None:
    try:
        return step_of(json.loads(line), where="")
    except (ValueError, RecursionError, TypeError):
        return None
