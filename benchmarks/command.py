"""Shared parts of the suites' commands: `--json` and `--quick`, progress on stderr, a table or JSON on stdout."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.process.log_setup import configure_logging

Result = dict[str, Any]
Progress = Callable[[str], None]
RUNS_DIR = Path("runs")
"""Folder of the environments of other systems and the quick start's task."""
_RIGHT = ("median", "spread", "value")


def suite_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every suite with a plan."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="a smoke run; its numbers mean nothing")
    return parser


def measure(
    run: Callable[[Progress], Coroutine[Any, Any, Result]], show: Callable[[Result], None], *, is_json: bool
) -> int:
    """Measure with `run(progress)`, then print JSON or a table by `show`. Returns the exit status."""
    configure_logging("bench", level="warning")
    result = asyncio.run(run(lambda text: print(text, file=sys.stderr)))
    if is_json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


def print_table(title: str, headings: Sequence[str], sections: Iterable[Iterable[Sequence[str]]]) -> None:
    """Print a table of sections of rows."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _RIGHT else "left")
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    Console().print(table)


def short(value: float) -> str:
    """A number with four digits, or with all digits before the point."""
    return str(value) if isinstance(value, bool) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
