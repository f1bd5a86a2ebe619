"""Creates folders for benchmarks, which are removed however the benchmark ends.

Promises:

- A folder is removed when its benchmark ends, also by SIGINT and SIGTERM (`console.cli` turns one into the other).
- The folder of a killed benchmark is removed by the next one that starts: its lock is free then. Only folders of
  this user are touched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY_FOLDER = Path("/dev/shm")
PREFIX = "penstock-bench-"
_LOCK = "in-use.lock"


@contextmanager
def scratch_folder(place: Path | None = None) -> Iterator[Path]:
    """A new folder in `place`, or in the temporary folder; removes abandoned ones there and in memory."""
    root = place or Path(tempfile.gettempdir())
    for each in {root, MEMORY_FOLDER}:
        remove_abandoned(each)
    # It is named once locked: before, it would look abandoned.
    made = Path(tempfile.mkdtemp(prefix=".", suffix=PREFIX, dir=root))
    try:
        with (made / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = made.rename(root / f"{PREFIX}{made.name[1 : -len(PREFIX)]}")
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_abandoned(root: Path) -> None:
    """Remove the folders of benchmarks that have ended."""
    for folder in root.glob(f"{PREFIX}*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
            return False
        with (folder / _LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # In use, already removed, or not created here.
        return False
    return True
