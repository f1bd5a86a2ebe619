"""A critic's checkpoints, on its disk or in object storage, written while it goes on.

Invariants:
- `steps` are those of complete checkpoints; one that is being written is none until `finish` says so.
- With a storage only what is there counts; this machine's copy of a checkpoint is deleted once it was uploaded.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from penstock.storage.fetched import fetched, forget_copies
from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.checkpoint import ResumeState, Saved, Saving
from services.trainer.checkpoints.checkpoint_storage import CheckpointStorage

_ALL = 1 << 30
"""Checkpoints kept when one is completed: what the trainer may go back to decides, not their number."""
_FIELD = "checkpoint_storage"


class KeptCheckpoints:
    """Those of one critic, listed by `refresh`; used by one thread. Calls raise OSError, and ConfigError of a storage.

    Args:
        root: Their folder on this machine.
        storage: Where they are, if not there.
    """

    def __init__(self, root: Path, storage: CheckpointStorage | None = None) -> None:
        self._root = root
        self._storage = storage
        self._steps: list[int] = []
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="critic-checkpoint")
        self._writing: tuple[int, Future[None]] | None = None

    def refresh(self) -> None:
        """See what is there, once what is being written is."""
        self.finish()
        if self._storage is not None:
            self._steps = self._storage.complete_steps()
        else:
            self._steps = [int(path.name.removeprefix("step_")) for path in checkpoint.list_complete(self._root)]

    def steps(self) -> list[int]:
        """Of complete ones, oldest first."""
        return list(self._steps)

    def load(self, model: Saved, step: int) -> None:
        """Load a complete one into the model; also raises BackendError and CheckpointFormatError."""
        if self._storage is None:
            model.load(self._root / f"step_{step}")
            return
        # A copy of this step that was fetched before may be of a past that the trainer went back from.
        forget_copies()
        model.load(fetched(_FIELD, self._storage.address(step)))

    def begin(self, model: Saved, step: int) -> None:
        """Copy the model's state, and write it in the background, after the one before."""
        self.finish()
        saving = checkpoint.begin(self._root, backend=model, state=ResumeState(num_steps=step))
        if saving is not None:
            self._writing = step, self._writer.submit(self._write, saving)

    @property
    def is_written(self) -> bool:
        """Whether there is one for `finish` that it need not wait for."""
        return self._writing is not None and self._writing[1].done()

    def finish(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            (step, written), self._writing = self._writing, None
            written.result()
            self._steps = sorted({*self._steps, step})

    def delete(self, step: int) -> None:
        """Delete a complete one."""
        if self._storage is not None:
            self._storage.delete(step)
        else:
            shutil.rmtree(self._root / f"step_{step}")
        self._steps.remove(step)

    def _write(self, saving: Saving) -> None:
        path = saving.finish(keep_last=_ALL)
        if self._storage is not None:
            try:
                self._storage.begin(saving.state.num_steps)
                self._storage.complete(saving.state.num_steps, path, {}, keep_last=_ALL)
            finally:
                shutil.rmtree(path, ignore_errors=True)
