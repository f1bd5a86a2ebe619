"""Detects a full disk and words the message about it."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NATIVE_ERROR = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust quote the kernel's error in their messages."""
LINES_BYTES = 16 * 2**20
"""Room for logs, metrics and records that a run needs beside its checkpoints."""


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk, a quota or a limit on the file's size has no room left."""
    if not isinstance(error, OSError):
        return False
    native = _NATIVE_ERROR.search(str(error)) if error.errno is None else None
    return (int(native[1]) if native else error.errno) in FULL_ERRORS


def free_bytes(folder: Path) -> int:
    """Bytes that this process can still write to the folder's disk; the folder need not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def needed_bytes(run_dir: Path) -> int:
    """Space that a run needs to continue: its next checkpoint, as large as the largest so far, and some for logs."""
    checkpoints = (run_dir / "checkpoints").glob("step_*")
    return LINES_BYTES + max((folder_bytes(path) for path in checkpoints), default=0)


def full_message(run_dir: Path, *, refused: Path | None = None) -> str:
    """One line: what is full, how much is free and needed, and how the run is continued.

    `refused` is what could not be written, where that is not in the run's folder.
    """
    path = refused or run_dir
    return (
        f"{path}: the disk is full: {_mib(free_bytes(path))} free, {_mib(needed_bytes(run_dir))} needed; "
        f"free some space, then continue with: penstock run --resume {run_dir}"
    )


def failure_message(run_dir: Path, error: OSError, *, refused: Path | None = None) -> str:
    """One line for a run that ends because its folder, or `refused`, cannot be written to."""
    if is_full(error):
        return full_message(run_dir, refused=refused)
    return f"{refused or run_dir}: cannot be written to: {error}"


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below; those that go away meanwhile are left out."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
