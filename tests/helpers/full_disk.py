"""A disk that takes no more, as the kernel has it: writes fail in the middle of a file."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Meanwhile no file of this process can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(num_bytes: int) -> Iterator[Path]:
    """A disk of that size; skips the test where this process may not mount one.

    It is mounted outside of pytest's own folders: one that a killed test leaves behind cannot be removed,
    and pytest, which removes old folders when it ends, would fail.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-disk-") as name:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=0777", "tmpfs", name]
        try:
            made = subprocess.run(mount, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if made.returncode != 0:
            pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """A file that takes all the room but `leave` bytes, also while others write; remove it to free the disk."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (room := os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - leave) > 0:
            file.write(bytes(min(room, 2**20)))
    return filler
