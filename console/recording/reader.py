"""Reads a recording: the surviving history, each sample once, in the order of training.

A run that was rewound trained some steps again. Its recording contains both, with different history counters: a row is
void if a later history contains a step of the same or an earlier version. A step that was recorded twice (the recorder
was restarted in the middle of it) counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path

from console.config.config import RECORDING_SUFFIXES
from console.recording.jsonl import read_json_lines
from console.recording.parts import parts_of
from console.recording.recorded_sample import Recorded, RecordingError, Step, group_of
from console.recording.row_codec import POSITION_COLUMNS, STEP_COLUMNS, Row, from_row, position_of, step_of
from penstock.v1 import types_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A trained group."""

    policy_version: int
    """The version that its step produced."""
    group: types_pb2.TrajectoryGroup
    """The group, including its completions' text."""


@dataclass(slots=True)
class RunIndex:
    """The content of a recording for one run."""

    first_versions: dict[int, int] = field(default_factory=dict)
    """First policy version of each history."""
    last_version: int = 0
    """Policy version of the last row."""
    last_history: int = 0
    """History of the last row."""

    def is_void(self, *, policy_version: int, history: int) -> bool:
        """Whether a later history replaced the step, or continued without it."""
        return any(later > history and first <= policy_version for later, first in self.first_versions.items())

    def note(self, policy_version: int, history: int) -> None:
        """Take in a row."""
        first = self.first_versions.get(history, policy_version)
        self.first_versions[history] = min(first, policy_version)
        self.last_version, self.last_history = policy_version, history


def check_suffix(path: Path) -> None:
    """Raise RecordingError unless the suffix names a format."""
    if path.suffix not in RECORDING_SUFFIXES:
        raise RecordingError(f"{path}: a recording's name ends in {' or '.join(RECORDING_SUFFIXES)}")


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
    """Every row as stored in the files, with its position for messages; only some columns if that is cheaper.

    All parts of a recording that was split by size are read, one after the other. Raises RecordingError.
    """
    check_suffix(path)
    parts = parts_of(path)
    if not parts:
        raise RecordingError(f"{path}: no such file")
    return chain.from_iterable(read_part(part, columns) for part in parts)


def read_part(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
    """The rows of one file; see `read_rows`."""
    if path.suffix == ".jsonl":
        return read_json_lines(path)
    from console.recording.parquet import read_parquet

    return read_parquet(path, columns)


def last_step(path: Path) -> tuple[Step | None, set[tuple[str, int]]]:
    """The step of a file's last row, and its recorded samples; None for an empty file.

    Reads all of the file. Raises RecordingError.
    """
    step: Step | None = None
    seen: set[tuple[str, int]] = set()
    for where, row in read_part(path, (*STEP_COLUMNS, *POSITION_COLUMNS)):
        found = step_of(row, where=where)
        if found != step:
            step, seen = found, set()
        seen.add(position_of(row, where=where))
    return step, seen


def scan(path: Path) -> dict[str, RunIndex]:
    """The content of a recording, by run id; reads all of it. Raises RecordingError."""
    runs: dict[str, RunIndex] = {}
    for where, row in read_rows(path, STEP_COLUMNS):
        run_id, policy_version, history = step_of(row, where=where)
        runs.setdefault(run_id, RunIndex()).note(policy_version, history)
    return runs


def read_samples(path: Path) -> Iterator[Recorded]:
    """The samples of the surviving history, each once; reads the file twice. Raises RecordingError."""
    runs = scan(path)
    step: Step | None = None
    seen: set[tuple[str, int]] = set()
    for where, row in read_rows(path):
        sample = from_row(row, where=where)
        if runs[sample.run_id].is_void(policy_version=sample.policy_version, history=sample.history):
            continue
        if sample.step != step:
            step, seen = sample.step, set()
        if sample.position not in seen:
            seen.add(sample.position)
            yield sample


def read_groups(path: Path) -> Iterator[RecordedGroup]:
    """The groups of the surviving history, each once. Raises RecordingError."""
    for (step, _), samples in groupby(read_samples(path), key=lambda sample: (sample.step, sample.position[0])):
        yield RecordedGroup(policy_version=step[1], group=group_of(list(samples)))
