"""Measures the disk below a folder by one file, written and read in order."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryFile

from console.probe.probe_file import Disk
from penstock.process.disk import free_bytes

MAX_BYTES = 512 << 20
_PIECE_BYTES = 4 << 20
_FREE_SHARE = 0.1


class DiskTooFullError(Exception):
    """There is no place for the file."""


def measure_disk(folder: Path, *, seconds: float) -> Disk:
    """Write and read an unnamed file, for `seconds` each and MAX_BYTES at most.

    Written pieces count once they are on the disk; what the kernel still holds of the file is dropped before reading,
    where the system can do that.

    Raises:
        DiskTooFullError: A tenth of the free space holds no piece.
        OSError: The file cannot be written.
    """
    most_bytes = min(MAX_BYTES, int(free_bytes(folder) * _FREE_SHARE))
    if most_bytes < _PIECE_BYTES:
        raise DiskTooFullError(
            f"{folder}: less than {_PIECE_BYTES / _FREE_SHARE / 2**20:.0f} MiB are free; free some space, or name a "
            "folder on another disk with --out"
        )
    # Random bytes, for disks that compress.
    piece = os.urandom(_PIECE_BYTES)
    with TemporaryFile(dir=folder, buffering=0) as file:
        descriptor = file.fileno()
        written, begin_s = 0, time.perf_counter()
        while written + _PIECE_BYTES <= most_bytes and (not written or time.perf_counter() - begin_s < seconds):
            written += os.write(descriptor, piece)
            os.fdatasync(descriptor)
        write_s = time.perf_counter() - begin_s
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        num_read, begin_s = 0, time.perf_counter()
        while (not num_read or time.perf_counter() - begin_s < seconds) and (
            found := os.read(descriptor, _PIECE_BYTES)
        ):
            num_read += len(found)
        read_s = time.perf_counter() - begin_s
    return Disk(write_GBps=written / write_s / 1e9, read_GBps=num_read / read_s / 1e9)
