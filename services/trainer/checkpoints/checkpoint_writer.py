"""Checkpoints written while training continues: state is copied in the compute thread, files are written in another.

- At most one is being written; the next one waits for it.
- A checkpoint that cannot be written ends the run: `watch` raises as soon as that is known, `finish` otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from penstock.process.tasks import uninterrupted
from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.checkpoint import ResumeState, Saving
from services.trainer.compute.compute_thread import ComputeThread
from services.trainer.model.backend import Backend

_log = structlog.get_logger()


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: Its checkpoint folder.
        keep_last: How many are kept.
        compute: The thread in which the backend works.
        on_written: Called with the policy version and folder of each complete checkpoint.
    """

    def __init__(
        self, root: Path, *, keep_last: int, compute: ComputeThread, on_written: Callable[[int, Path], None]
    ) -> None:
        self.root = root
        self._keep_last = keep_last
        self._compute = compute
        self._on_written = on_written
        self._writing: asyncio.Task[None] | None = None
        self._writing_step: int | None = None
        self._failed = asyncio.Event()

    async def load_latest(self, backend: Backend) -> ResumeState | None:
        """Load the newest complete checkpoint, or None. Raises CheckpointFormatError."""
        return await self._compute.run(checkpoint.load_latest, self.root, backend=backend)

    async def begin(self, backend: Backend, state: ResumeState) -> None:
        """Copy the state and begin to write it, unless that step has a checkpoint or one is being written.

        Raises:
            OSError: The disk refused this checkpoint or the previous one.
        """
        if self._writing is not None and self._writing_step == state.num_steps:
            return
        await self.finish()
        saving = await self._compute.run(checkpoint.begin, self.root, backend=backend, state=state)
        if saving is not None:
            self._writing_step = state.num_steps
            self._writing = asyncio.create_task(self._write(saving))

    async def finish(self) -> None:
        """Wait until nothing is being written; raises OSError, once, if a write failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await uninterrupted(writing)

    async def watch(self) -> None:
        """Runs until a checkpoint cannot be written, and raises its OSError."""
        await self._failed.wait()
        await self.finish()

    async def _write(self, saving: Saving) -> None:
        try:
            path = await asyncio.to_thread(saving.finish, keep_last=self._keep_last)
        except OSError as error:
            _log.error("a checkpoint cannot be written; those before are whole", path=saving.final, error=str(error))
            self._failed.set()
            raise
        self._on_written(saving.state.num_steps, path)
