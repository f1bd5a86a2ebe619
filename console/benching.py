"""What `penstock bench` does whatever it measures: progress to stderr, then a table or JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from penstock.process.log_setup import configure_logging

Result = dict[str, Any]
RUNS_DIR = Path("runs")
"""Environments of what is measured beside Penstock are made there, and the quick start's task."""


def bench(
    run: Callable[[Callable[[str], None]], Coroutine[Any, Any, Result]],
    show: Callable[[Result], None],
    *,
    is_json: bool,
) -> int:
    """Measure with `run(progress)`; `show` prints the result for people. Returns the exit status."""
    configure_logging("bench", level="warning")
    result = asyncio.run(run(lambda text: print(text, file=sys.stderr)))
    if is_json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0
