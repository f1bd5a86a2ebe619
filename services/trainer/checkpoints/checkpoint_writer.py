"""Checkpoints written while training continues: state is copied in the compute thread, files are written in another.

- At most one is being written; the next one waits for it.
- A checkpoint that cannot be written ends the run: `watch` raises as soon as that is known, `finish` otherwise.

With object storage each is then uploaded, also in the background, as a part of being written:

- One that falls due meanwhile is left out rather than waited for (`may_skip`).
- One that cannot be uploaded is counted and reported (`problem`), and training goes on, but a run does not end well
  without its last one (`end`).
- If some processes do not see the run's folder, nothing stays there: the storage has the only whole checkpoint.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from prometheus_client import Counter

from penstock.config import ConfigError
from penstock.errors import FencedError, PenstockError
from penstock.process.tasks import uninterrupted
from penstock.storage.addresses import Address
from penstock.storage.fetched import fetched
from penstock.storage.storage import StorageError
from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.checkpoint import CheckpointFormatError, ResumeState, Saving
from services.trainer.checkpoints.checkpoint_storage import CheckpointStorage
from services.trainer.compute.compute_thread import ComputeThread
from services.trainer.model.backend import Backend

UPLOAD_FAILURES = Counter("penstock_trainer_checkpoint_upload_failures", "Checkpoints that object storage refused")
SKIPPED = Counter("penstock_trainer_checkpoints_skipped", "Checkpoints left out, as the one before was being uploaded")

_FIELD = "run.checkpoint_storage"
_log = structlog.get_logger()


@contextmanager
def _named() -> Iterator[None]:
    """Begins errors of the storage with the setting that names it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{_FIELD}: {error}") from error
    except StorageError as error:
        raise StorageError(f"{_FIELD}: {error}") from error


class Checkpoints:
    """The checkpoints of one run.

    Args:
        root: Its checkpoint folder.
        keep_last: How many are kept.
        compute: The thread in which the backend works.
        on_written: Called with the policy version and the folder or address of each complete checkpoint.
        storage: Where they are copied to, if anywhere.
        check_owner: Raises an error once another trainer may write there.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int,
        compute: ComputeThread,
        on_written: Callable[[int, Path | Address], None],
        storage: CheckpointStorage | None = None,
        check_owner: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.root = root
        self.problem = ""
        """Why the newest checkpoint is not in the storage; empty if it is."""
        self._keep_last = keep_last
        self._compute = compute
        self._on_written = on_written
        self._storage = storage
        self._check_owner = check_owner
        self._stored_step: int | None = None
        """Of the newest one that is known to be in the storage."""
        self._writing: asyncio.Task[None] | None = None
        self._writing_step: int | None = None
        self._failed = asyncio.Event()

    async def check_storage(self, *, is_new: bool) -> None:
        """Try the storage, if there is one, before anything is trained.

        Args:
            is_new: Whether the run begins: there must be no checkpoints of another run of this name.

        Raises:
            ConfigError, StorageError: It cannot be written to, or holds a run.
        """
        if self._storage is None:
            return
        with _named():
            await asyncio.to_thread(self._storage.check)
        if is_new and await self._newest_stored() is not None:
            raise ConfigError(
                f"{_FIELD}: {self._storage.folder} holds a run already; resume it, or choose another run.id"
            )

    async def load_latest(self, backend: Backend) -> ResumeState | None:
        """Load the newest complete checkpoint, of the folder or the storage; None if there is none.

        Raises:
            CheckpointFormatError, BackendError, ConfigError, OSError: It cannot be read.
        """
        local = None if backend.is_spread else await asyncio.to_thread(checkpoint.newest_step, self.root)
        stored = self._stored_step = await self._newest_stored()
        if self._storage is None or stored is None or (local is not None and local >= stored):
            if local is None:
                return None
            return await self._compute.run(checkpoint.load_latest, self.root, backend=backend)
        address = self._storage.address(stored)
        text = await asyncio.to_thread(self._storage.state_text, stored)
        await self._compute.run(backend.load, address)
        # By now it is there.
        copy = await asyncio.to_thread(fetched, _FIELD, address)
        await asyncio.to_thread(self._storage.restore_records, copy)
        _log.info("loaded a checkpoint from object storage", address=address)
        return checkpoint.parse_state(text, source=address)

    async def prefer_storage(self) -> list[int]:
        """Delete the folder's checkpoints, if the storage has one; returns their steps. Raises ConfigError, OSError."""
        if await self._newest_stored() is None:
            return []
        return await asyncio.to_thread(checkpoint.delete_all, self.root)

    async def _newest_stored(self) -> int | None:
        with _named():
            return None if self._storage is None else await asyncio.to_thread(self._storage.newest)

    async def begin(self, backend: Backend, state: ResumeState, *, may_skip: bool = False) -> None:
        """Copy the state and begin to write it, unless that step has a checkpoint or one is being written.

        Args:
            backend: Has the model and the optimiser.
            state: Where the run is.
            may_skip: Leave it out if the one before is still being written or uploaded, with object storage.

        Raises:
            OSError: The disk refused this checkpoint or the previous one.
        """
        if self._writing is not None and self._writing_step == state.num_steps:
            return
        if may_skip and self._storage is not None and self._writing is not None and not self._writing.done():
            _log.warning("a checkpoint is left out: the one before is still being uploaded", step=state.num_steps)
            SKIPPED.inc()
            return
        await self.finish()
        if backend.is_spread and self._stored_step == state.num_steps:
            return
        saving = await self._compute.run(checkpoint.begin, self.root, backend=backend, state=state)
        self._writing_step = state.num_steps
        if saving is not None:
            self._writing = asyncio.create_task(self._write(backend, saving))
        elif self._storage is not None and self._stored_step != state.num_steps:
            directory = self.root / f"step_{state.num_steps}"
            self._writing = asyncio.create_task(self._upload(backend, self._storage, state.num_steps, directory))

    async def finish(self) -> None:
        """Wait until nothing is being written; raises OSError, once, if a write failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await uninterrupted(writing)

    async def end(self) -> None:
        """Wait likewise for the last one; raises OSError if it was not written, or is not in the storage."""
        await self.finish()
        if self.problem:
            raise StorageError(self.problem)

    async def watch(self) -> None:
        """Runs until a checkpoint cannot be written, and raises its OSError."""
        await self._failed.wait()
        await self.finish()

    async def _write(self, backend: Backend, saving: Saving) -> None:
        step = saving.state.num_steps
        try:
            if backend.is_spread:
                path = await asyncio.to_thread(saving.wait)
            else:
                path = await asyncio.to_thread(saving.finish, keep_last=self._keep_last)
                self._on_written(step, path)
        except OSError as error:
            _log.error("a checkpoint cannot be written; those before are whole", path=saving.final, error=str(error))
            self._failed.set()
            raise
        if self._storage is not None:
            await self._upload(backend, self._storage, step, path)

    async def _upload(self, backend: Backend, storage: CheckpointStorage, step: int, directory: Path) -> None:
        """Copy a checkpoint to the storage; a refusal is counted and kept as `problem`."""
        address = storage.address(step)
        try:
            await asyncio.to_thread(storage.begin, step)
            uploaded = await asyncio.wrap_future(await self._compute.run(backend.upload, directory, address))
            if self._check_owner is not None:
                await self._check_owner()
            await asyncio.to_thread(storage.complete, step, directory, uploaded, keep_last=self._keep_last)
        except FencedError as error:
            _log.error("a checkpoint is not completed: the run belongs to another trainer", error=str(error))
        except (ConfigError, CheckpointFormatError, PenstockError, OSError) as error:
            UPLOAD_FAILURES.inc()
            self.problem = f"{_FIELD}: the checkpoint of step {step} was not uploaded: {error}"
            _log.error("a checkpoint cannot be uploaded; training goes on", address=address, error=str(error))
        else:
            self._stored_step, self.problem = step, ""
            _log.info("checkpoint uploaded", address=address)
            if backend.is_spread:
                self._on_written(step, address)
        finally:
            if backend.is_spread:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
