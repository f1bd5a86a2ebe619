"""Ends a run with a clear message before its folder is full, while its last checkpoint may still fit."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.process.disk import failure_message, free_bytes, full_message

MIN_FREE_BYTES = 4 * 2**20
"""A Redis that cannot append refuses every write, and others wait for it: below this, nothing can continue for long."""
POLL_S = 1.0


class FolderRefusedError(Exception):
    """The run folder cannot be written to; the message names it, the reason and the fix."""


class DiskWatch:
    """Watches the disk of a run's folder, and is notified of failed writes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._refused = asyncio.Event()
        self._message = ""

    def take_refusal(self, error: OSError, path: Path | None = None) -> None:
        """A write to the folder failed, or to `path`, which may be elsewhere."""
        if not self._refused.is_set():
            self._message = failure_message(self._run_dir, error, refused=path)
            self._refused.set()

    async def watch(self) -> None:
        """Run until the folder is full or nearly full, or a write failed; raises FolderRefusedError."""
        while not self._refused.is_set():
            if free_bytes(self._run_dir) < MIN_FREE_BYTES:
                self._message = full_message(self._run_dir)
                break
            try:
                async with asyncio.timeout(POLL_S):
                    await self._refused.wait()
            except TimeoutError:
                continue
        raise FolderRefusedError(self._message)
