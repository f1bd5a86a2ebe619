"""Names the files of a recording: FILE.jsonl, then FILE-00002.jsonl, FILE-00003.jsonl ... if it is split by size."""

from __future__ import annotations

from itertools import count, takewhile
from pathlib import Path


def part_path(path: Path, number: int) -> Path:
    """Part `number` of a recording, counted from 1."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number:05d}{path.suffix}")


def parts_of(path: Path) -> list[Path]:
    """The existing parts of a recording, in order; may be empty."""
    return list(takewhile(Path.is_file, (part_path(path, number) for number in count(1))))
