"""Files that outlive a power failure: replaced whole, and on the disk when the call returns."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write `text` to `path`, in one step for readers; raises OSError and leaves what was there.

    Args:
        path: In a folder that exists.
        text: All of it.
        mode: Permissions, before the umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode=mode)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Force what was written to a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
