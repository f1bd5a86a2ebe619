"""Formats values and tables for the terminal and the report."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 240


def number(value: object, form: str) -> str:
    """A number in that form, or `-` for anything else."""
    return format(value, form) if isinstance(value, (int, float)) and not isinstance(value, bool) else "-"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, as short as possible; `-` if unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plain_table(
    names: Sequence[str], rows: Iterable[Iterable[object]], *, justify: Literal["left", "right"] = "left"
) -> Table:
    """A table without lines, of the cells as text."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify=justify)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def plain_console() -> Console:
    """Prints tables to terminals, at their width, and to pipes, wide enough that nothing is cut."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
