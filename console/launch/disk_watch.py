"""Ends a run with a clear message before its folder is full, while its last checkpoint may still fit."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.process.disk import free_bytes, full_message

MIN_FREE_BYTES = 4 * 2**20
"""A Redis that cannot append refuses every write, and others wait for it: below this, nothing can continue for long."""
POLL_S = 1.0


class FolderRefusedError(Exception):
    """The run folder cannot be written to; the message names it, the reason and the fix."""


async def watch_disk(run_dir: Path) -> None:
    """Run until the disk of the run's folder is full or nearly full; raises FolderRefusedError."""
    while free_bytes(run_dir) >= MIN_FREE_BYTES:  # noqa: ASYNC110 - a disk sets no event
        await asyncio.sleep(POLL_S)
    raise FolderRefusedError(full_message(run_dir))
