"""Keeps a growing file of lines below a size: when it is full, every second step of its older half goes.

The first step stays, the newest ones are whole, and in between fewer remain the older they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

FULL_TO = 0.75
"""Part of the size that a full file is thinned to."""
_Extent = tuple[int, int]


def thin(path: Path, *, to_bytes: int, step_of: Callable[[bytes], Hashable | None], max_line_bytes: int) -> None:
    """Cut a file down to about that size, in one step for readers. Raises OSError.

    Args:
        path: The file.
        to_bytes: Its size then; its newest step stays, however large.
        step_of: The step of a line; None for a damaged one, which goes.
        max_line_bytes: Longer lines are damaged.
    """
    kept = chosen(_steps(path, step_of, max_line_bytes), to_bytes=to_bytes)
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


def _steps(path: Path, step_of: Callable[[bytes], Hashable | None], max_line_bytes: int) -> list[_Extent]:
    """From where to where the lines of each step are; damaged lines belong to none."""
    found: list[_Extent] = []
    last: Hashable | None = None
    with path.open("rb") as file:
        end = 0
        while line := file.readline(max_line_bytes):
            begin, end = end, end + len(line)
            step = step_of(line)
            if step is not None and step == last:
                found[-1] = (found[-1][0], end)
            elif step is not None:
                found.append((begin, end))
            last = step
    return found
