"""Lets one console at a time use a run folder, by a lock on a file in it that the kernel releases with the process.

The file outlives the lock; while it is held, or its holder was killed, it names the holder. If the file system has no
locks, the folder is used without one, and a note says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.config import ConfigError
from penstock.process.disk import failure_message

LOCK_NAME = "console.lock"
_NAMED_WITHIN_S = 1.0
"""A holder names itself at once, but after it has the lock."""
_HAS_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[str]:
    """Make the folder if needed and hold its lock; yields a note for the user, or nothing.

    Raises ConfigError if the lock is already held, or the folder cannot be written to.
    """
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ConfigError(f"run.dir: {failure_message(folder, error)}") from error
    try:
        note = _lock(descriptor, path)
        try:
            yield note
        finally:
            # So that the next holder is not taken for this one before it has named itself.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> str:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path.parent}: this run is under way ({_holder(path)}); stop it first: penstock stop"
        ) from None
    except OSError as error:
        if error.errno not in _HAS_NO_LOCKS:
            raise ConfigError(f"run.dir: {failure_message(path.parent, error)}") from error
        return f"{path}: this file system has no locks; make sure that no other console uses the folder"
    # The lock is valid even on a full disk.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n", 0)
    return ""


def _holder(path: Path) -> str:
    end_s = time.monotonic() + _NAMED_WITHIN_S
    while True:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return f"process {int(found['pid'])} on {found['host']}"
        except (OSError, ValueError, TypeError, KeyError):
            if time.monotonic() > end_s:
                return "another process"
        time.sleep(0.02)
