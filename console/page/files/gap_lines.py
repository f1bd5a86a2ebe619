"""Reads the log-prob gaps that a trainer keeps (`services/trainer/reporting/logprob_gaps.py`)."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

from console.page.files.indexed_recording import JsonLinesRecording
from console.page.files.values import mapping, text

NAME = "logprob_gaps.jsonl"


class GapLines:
    """Those of one run."""

    def __init__(self, folder: Path) -> None:
        # Its lines name their steps and groups as those of a recording do.
        self._lines = JsonLinesRecording(folder / NAME)

    def of(self, step: int, group_id: str, index: int) -> list[float | None]:
        """The gaps of a sample's trained tokens in nats, in order; empty where none are kept."""
        self._lines.advance()
        for row in self._lines.rows(self._lines.index.of_step(step, group_id)[-1:]):
            if row.get("group_id") == group_id:
                return _decoded(text(mapping(row.get("gaps")).get(str(index)), most=16 * 1024 * 1024))
        return []


def _decoded(encoded: str) -> list[float | None]:
    try:
        found = np.frombuffer(base64.b64decode(encoded, validate=True), "<f2").astype(np.float64)
    except ValueError:
        return []
    return [each if is_finite else None for each, is_finite in zip(found.tolist(), np.isfinite(found), strict=True)]
