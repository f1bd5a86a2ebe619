"""Holds the numbers of metrics.jsonl or evaluations.jsonl as columns, in bounded memory, and keeps up as they grow."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from console.page.files.growing_file import GrowingFile

Column = npt.NDArray[np.float64]

MAX_LINE_BYTES = 1024 * 1024
MAX_NAMES = 1000
MAX_CELLS = 4_000_000
"""32 MB; beyond it every second line is forgotten."""
VERSION, TIME, TOKENS = "policy_version", "time", "step/response_tokens"
_NO_METRICS = (VERSION, TIME, "history")


class MetricsTable:
    """One file's lines in the order of their policy versions.

    A line of a version that is there already, or of an older one, replaces that one and those after it: the trainer
    went back.

    Args:
        path: Of the file.
        prefix: Before its metrics' names.
        max_cells: Numbers held at most.
    """

    def __init__(self, path: Path, *, prefix: str = "", max_cells: int = MAX_CELLS) -> None:
        self._file = GrowingFile(path, max_line_bytes=MAX_LINE_BYTES)
        self._prefix = prefix
        self._max_cells = max_cells
        self._clear()

    def _clear(self) -> None:
        self._versions, self._times, self._tokens = array("d"), array("d"), array("d")
        self._columns: dict[str, array[float]] = {}
        self._generation = self._file.generation
        self._num_tokens = 0.0
        self._num_lines, self._stride = 0, 1

    def refresh(self) -> None:
        """Take in what was written since."""
        has_changed = self._file.has_changed()
        if self._generation != self._file.generation:
            self._clear()
        for _, text in self._file.lines() if has_changed else ():
            if self._generation != self._file.generation:
                self._clear()
            line = _parsed(text)
            if line is not None:
                self._add(line)

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in alphabetical order."""
        return sorted(self._prefix + name for name in self._columns)

    @property
    def versions(self) -> Column:
        """Policy version of each line, float64[n], ascending."""
        return np.array(self._versions)

    @property
    def times(self) -> Column:
        """When each was written, Unix seconds, float64[n]; NaN where it does not say so."""
        return np.array(self._times)

    @property
    def tokens(self) -> Column:
        """Completion tokens trained up to each line, float64[n]."""
        return np.array(self._tokens)

    def column(self, name: str) -> Column:
        """The values of a metric, float64[n], NaN where there is none."""
        values = np.full(len(self._versions), np.nan)
        found = self._columns.get(name.removeprefix(self._prefix)) if name.startswith(self._prefix) else None
        if found is not None:
            values[: len(found)] = found
        return values

    def time_of(self, version: int) -> float | None:
        """When the step of that version ended, Unix seconds; None if it is not known."""
        versions = self.versions
        index = int(np.searchsorted(versions, version))
        if index == len(versions) or versions[index] != version or not math.isfinite(self._times[index]):
            return None
        return self._times[index]

    def _add(self, line: dict[str, Any]) -> None:
        version = _number(line[VERSION])
        while self._versions and self._versions[-1] >= version:
            self._cut()
        tokens = _number(line.get(TOKENS))
        self._num_tokens += 0.0 if math.isnan(tokens) else tokens
        self._num_lines += 1
        if self._num_lines % self._stride:
            return
        num = len(self._versions)
        self._versions.append(version)
        self._times.append(_number(line.get(TIME)))
        self._tokens.append(self._num_tokens)
        for name, value in line.items():
            if name in _NO_METRICS or math.isnan(number := _number(value)):
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MAX_NAMES:
                    continue
                column = self._columns[name] = array("d")
            column.extend([math.nan] * (num - len(column)))
            column.append(number)
        if (num + 1) * (len(self._columns) + 3) > self._max_cells:
            self._thin()

    def _cut(self) -> None:
        num = len(self._versions) - 1
        for column in (self._versions, self._times, self._tokens, *self._columns.values()):
            del column[num:]
        self._num_tokens = self._tokens[-1] if self._tokens else 0.0

    def _thin(self) -> None:
        self._stride *= 2
        self._versions, self._times, self._tokens = self._versions[1::2], self._times[1::2], self._tokens[1::2]
        self._columns = {name: column[1::2] for name, column in self._columns.items()}


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_line = isinstance(line, dict) and not math.isnan(_number(line.get(VERSION)))
    return line if is_line else None


def _number(value: object) -> float:
    """A finite number, else NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
