"""A run's checkpoints in object storage: whole or not there.

    ADDRESS/RUN_ID/step_N/resume/shard-*.safetensors    each uploaded by the process that wrote it
    ADDRESS/RUN_ID/step_N/...                           the rest, by the first process
    ADDRESS/RUN_ID/step_N/records/...                   the run's metrics until then
    ADDRESS/RUN_ID/step_N/MANIFEST.json                 names, sizes and digests of all of them; written last

Invariants:
- A checkpoint without its manifest is never loaded, and one whose files have other digests is refused.
- The manifest is deleted first and written last, so what is overwritten or half deleted does not count.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from penstock.storage.addresses import Address, below
from penstock.storage.manifest import MANIFEST_NAME, ManifestError, manifest_text, read_manifest
from penstock.storage.storage import FileDigest, Storage
from services.trainer.checkpoints.checkpoint import COMPLETE_MARKER, STATE_FILE, CheckpointFormatError

_STEP = re.compile(r"step_(\d+)")
_NUM_STREAMS = 4
_PROBE = ".writable"
_RECORDS = "records"


class CheckpointStorage:
    """The checkpoints of one run; its calls block, and raise ConfigError or OSError (StorageError).

    Args:
        folder: The run's own.
        records: Files of the run's folder on this disk that grow line by line, and go with every checkpoint.
    """

    def __init__(self, folder: Address, records: Sequence[Path] = ()) -> None:
        self.folder = folder
        self._records = tuple(records)

    @cached_property
    def _storage(self) -> Storage:
        return Storage(self.folder)

    def address(self, step: int) -> Address:
        """Of the checkpoint of that step."""
        return below(self.folder, f"step_{step}")

    def newest(self) -> int | None:
        """Step of the newest complete checkpoint; None without one."""
        return next((step for step in self._steps() if self._is_complete(step)), None)

    def complete_steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return [step for step in reversed(self._steps()) if self._is_complete(step)]

    def delete(self, step: int) -> None:
        """Delete a checkpoint, if there is one."""
        self.begin(step)
        self._storage.delete(f"step_{step}")

    def state_text(self, step: int) -> str:
        """Where the run was, as JSON; raises CheckpointFormatError if it is not there."""
        found = self._storage.read(f"step_{step}/{STATE_FILE.as_posix()}")
        if found is None:
            raise CheckpointFormatError(f"{self.address(step)}: holds no {STATE_FILE}")
        return found.decode()

    def check(self) -> None:
        """Write something and delete it again; raises what refuses that."""
        self._storage.write(_PROBE, b"")
        self._storage.delete(_PROBE)

    def begin(self, step: int) -> None:
        """Let an earlier checkpoint of that step not count any more."""
        self._storage.delete(f"step_{step}/{MANIFEST_NAME}")

    def complete(self, step: int, directory: Path, uploaded: Mapping[str, FileDigest], *, keep_last: int) -> None:
        """Copy what is missing of a checkpoint, write its manifest, and delete those that are no longer kept.

        Args:
            step: Of the checkpoint.
            directory: It, on the first process' disk.
            uploaded: What is there already, by name.
            keep_last: Complete checkpoints kept, this one included.
        """
        paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        rest = sorted(paths.keys() - uploaded.keys() - {COMPLETE_MARKER})
        with ThreadPoolExecutor(_NUM_STREAMS, thread_name_prefix="upload") as pool:
            digests = pool.map(lambda name: self._storage.upload(paths[name], f"step_{step}/{name}"), rest)
            files = {**uploaded, **dict(zip(rest, digests, strict=True))}
        for path in filter(Path.is_file, self._records):
            name = f"{_RECORDS}/{path.name}"
            files[name] = self._storage.write(f"step_{step}/{name}", path.read_bytes())
        self._storage.write(f"step_{step}/{MANIFEST_NAME}", manifest_text(files).encode())
        self._prune(keep_last)

    def restore_records(self, copy: Path) -> None:
        """Give the run's folder the records that came with a checkpoint, unless it has more of them.

        Args:
            copy: The checkpoint, fetched.

        Raises:
            OSError: The disk refused.
        """
        for path in self._records:
            stored = copy / _RECORDS / path.name
            if stored.is_file() and not (path.is_file() and path.stat().st_size >= stored.stat().st_size):
                shutil.copyfile(stored, path)

    def _prune(self, keep_last: int) -> None:
        kept = 0
        for step in self._steps():
            if kept < keep_last and self._is_complete(step):
                kept += 1
                continue
            self.delete(step)

    def _steps(self) -> list[int]:
        """Steps of which there is something, newest first."""
        matches = map(_STEP.fullmatch, self._storage.names())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def _is_complete(self, step: int) -> bool:
        text = self._storage.read(f"step_{step}/{MANIFEST_NAME}")
        try:
            return text is not None and bool(read_manifest(text))
        except ManifestError as error:
            raise CheckpointFormatError(f"{self.address(step)}/{MANIFEST_NAME}: {error}") from error
