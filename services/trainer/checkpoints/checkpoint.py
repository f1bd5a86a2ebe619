"""Checkpoints on disk: whole or not there.

    begin (copies) --> step_N.tmp/ --(finish: all files written and synced)--> step_N/ --(COMPLETE written)--> loadable

    step_N/  config.json *.safetensors tokenizer*     loads with `transformers`
             resume/*.safetensors                     the backend's: weights, optimiser, random state
             resume/trainer.json                      `ResumeState`
             COMPLETE                                 names and sizes of all other files

Invariants:
- A directory without its marker, or whose files differ from the marker's list, is never loaded.
- The marker is written last, after everything else reached the disk; deleting starts with the marker.
- A save that fails leaves nothing behind: what it wrote may be what filled the disk.
- At every moment of a save the newest complete checkpoint before it can still be loaded.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.process.durable_files import replace_file, sync_file, sync_folder
from penstock.storage.addresses import Address

COMPLETE_MARKER = "COMPLETE"
STATE_FILE = Path("resume") / "trainer.json"
FORMAT_VERSION = 2
MAX_JSON_BYTES = 64 * 1024 * 1024
"""Limit of what is read into memory as JSON; real states are a few kB, the step log being the largest part."""
_FORMER_FIELDS = ("policy_version", "data_epoch", "broker_cursor", "trained_group_ids")
"""Earlier versions wrote them into STATE_FILE, and nothing reads them."""
_STEP_DIRECTORY = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The run's progress, without the model: plain values that survive JSON."""

    num_steps: int
    """Optimiser steps taken since the run began: the policy version of these weights."""
    data_position: int = 0
    """Training prompts submitted so far."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """The service's other state, as text by name."""


class Saved(Protocol):
    """What a checkpoint holds: a `Backend`, or a critic of its own."""

    def save(self, directory: Path) -> Future[None]:
        """See `Backend.save`."""

    def load(self, source: Path | Address) -> None:
        """See `Backend.load`."""


class CheckpointFormatError(Exception):
    """A complete checkpoint cannot be read by this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A checkpoint whose files are being written."""

    state: ResumeState
    temporary: Path
    final: Path
    written: Future[None]

    def finish(self, *, keep_last: int) -> Path:
        """Waits for the files, completes the checkpoint and deletes what `keep_last` no longer keeps; in any thread.

        Args:
            keep_last: Complete checkpoints kept, this one included; at least 1.

        Raises:
            OSError: The disk refused; the checkpoints before are untouched.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        try:
            self.wait()
            sizes = _sync_tree(self.temporary)
            self.temporary.rename(self.final)
            sync_folder(self.final.parent)
            _write_marker(self.final, sizes)
        except OSError:
            for unfinished in (self.temporary, self.final):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        prune(self.final.parent, keep_last=keep_last)
        return self.final

    def wait(self) -> Path:
        """Waits for the files in `temporary`, which then hold all that is on this disk; raises OSError."""
        self.written.result()
        _write_state(self.temporary / STATE_FILE, self.state)
        return self.temporary


def begin(root: Path, *, backend: Saved, state: ResumeState) -> Saving | None:
    """Begins `root/step_<num_steps>`: on return training may continue; `finish` makes it valid.

    Args:
        root: The run's checkpoint folder; made if missing. One process writes to it, one checkpoint at a time.
        backend: Writes the model and the optimiser.
        state: Where the run is; its `num_steps` names the checkpoint.

    Returns:
        None if the step has a complete checkpoint, which is left as it is.

    Raises:
        OSError: The disk refused; earlier checkpoints are untouched.
    """
    final = root / f"step_{state.num_steps}"
    if is_complete(final):
        return None
    temporary = root / f"step_{state.num_steps}.tmp"
    for leftover in (temporary, final):
        if leftover.is_symlink() or leftover.exists():
            _delete(leftover)
    temporary.mkdir(parents=True)
    return Saving(state=state, temporary=temporary, final=final, written=backend.save(temporary))


def newest_step(root: Path) -> int | None:
    """Of the newest complete checkpoint; None if there is none."""
    complete = list_complete(root)
    return int(complete[-1].name.removeprefix("step_")) if complete else None


def newest_state(root: Path) -> ResumeState | None:
    """Of the newest complete checkpoint; None if there is none. Raises CheckpointFormatError."""
    complete = list_complete(root)
    return _read_state(complete[-1]) if complete else None


def delete_all(root: Path) -> list[int]:
    """Deletes all checkpoints, whole or not, and returns their steps. Raises OSError."""
    found = sorted(_step_directories(root))
    for _, path in found:
        _delete(path)
    return [step for step, _ in found]


def load_latest(root: Path, *, backend: Saved) -> ResumeState | None:
    """Loads the newest complete checkpoint into `backend`.

    Returns:
        Where the run was, or None when there is no complete checkpoint (then nothing was loaded).

    Raises:
        CheckpointFormatError: The newest one was written by another version, or its state is damaged.
        services.trainer.model.backend.CheckpointMismatchError: It is of another model.
    """
    complete = list_complete(root)
    if not complete:
        return None
    state = _read_state(complete[-1])
    backend.load(complete[-1])
    return state


def list_complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    return [path for _, path in sorted(_step_directories(root)) if is_complete(path)]


def is_complete(directory: Path) -> bool:
    """Whether the marker exists and every file it names has the stated size."""
    marker = directory / COMPLETE_MARKER
    if not marker.is_file() or marker.stat().st_size > MAX_JSON_BYTES:
        return False
    try:
        sizes = json.loads(marker.read_text(encoding="utf-8"))["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError):
        # A damaged marker or a missing file means "not complete"; that is the answer, not a failure.
        return False


def prune(root: Path, *, keep_last: int) -> list[Path]:
    """Deletes complete checkpoints beyond the newest `keep_last`, and leftovers of interrupted saves before those.

    Returns:
        What was deleted.
    """
    kept = set(list_complete(root)[-keep_last:])
    deleted = [path for _, path in sorted(_step_directories(root)) if path not in kept]
    deleted += sorted(path for path in root.glob("step_*.tmp") if path.is_dir())
    for path in deleted:
        _delete(path)
    return deleted


def _delete(path: Path) -> None:
    """Delete a folder and its content; of a link, only the link itself."""
    if path.is_symlink():
        path.unlink()
        return
    # First, so that a partly deleted checkpoint does not count.
    (path / COMPLETE_MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


def _step_directories(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    found = [(_STEP_DIRECTORY.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir()]
    return [(int(match[1]), path) for match, path in found if match]


def _read_state(directory: Path) -> ResumeState:
    path = directory / STATE_FILE
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointFormatError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointFormatError(f"{path}: cannot be read: {error}") from error
    return parse_state(text, source=str(path))


def parse_state(text: str, *, source: str) -> ResumeState:
    """What a checkpoint's STATE_FILE says; raises CheckpointFormatError that begins with `source`."""
    try:
        document = json.loads(text)
        version = document.pop("format")
        if version != FORMAT_VERSION:
            raise CheckpointFormatError(f"{source}: format {version}, this version reads {FORMAT_VERSION}")
        return ResumeState(**{name: value for name, value in document.items() if name not in _FORMER_FIELDS})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointFormatError(f"{source}: cannot be read: {error}") from error


def _write_state(path: Path, state: ResumeState) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT_VERSION, **asdict(state)}), encoding="utf-8")


def _write_marker(directory: Path, sizes: Mapping[str, int]) -> None:
    replace_file(directory / COMPLETE_MARKER, json.dumps({"files": dict(sizes)}))


def _sync_tree(directory: Path) -> dict[str, int]:
    """Forces all files and folders to the disk; returns file sizes by path relative to `directory`."""
    sizes: dict[str, int] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            sync_file(path)
            sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
        else:
            sync_folder(path)
    sync_folder(directory)
    return sizes
