"""Writes files atomically: temporary files are synced to disk before the first of them is renamed into place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import ConfigError
from penstock.process.disk import is_full
from penstock.process.durable_files import sync_folder


@dataclass(frozen=True, slots=True)
class File:
    """A file to write."""

    name: str
    content: bytes
    mode: int


@contextlib.contextmanager
def named_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError of one line that names the path."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            reason = "the disk is full; free some space, then repeat the command"
        else:
            reason = f"cannot be {doing}: {error.strerror or error}"
        raise ConfigError(f"{path}: {reason}") from error


@contextlib.contextmanager
def staged(folder: Path, files: Sequence[File]) -> Iterator[None]:
    """Write temporary files, renamed into place in this order when the block ends without an error.

    A failed write changes none of the files. Only one writer may use the folder at a time. Raises ConfigError.
    """
    try:
        for file in files:
            with named_errors(folder / file.name, "written"):
                _write_beside(folder, file)
        yield
        for file in files:
            with named_errors(folder / file.name, "replaced"):
                os.replace(_beside(folder, file), folder / file.name)
        with named_errors(folder, "written"):
            sync_folder(folder)
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                _beside(folder, file).unlink(missing_ok=True)


def write_new(folder: Path, file: File) -> None:
    """Write a file that must not exist yet. Raises ConfigError, and then leaves no file behind."""
    path = folder / file.name
    with named_errors(path, "written"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode)
        try:
            _fill(descriptor, file)
        except OSError:
            path.unlink()
            raise


def _beside(folder: Path, file: File) -> Path:
    return folder / f".{file.name}.new"


def _write_beside(folder: Path, file: File) -> None:
    path = _beside(folder, file)
    # A file left by a killed command may be readable by others; keys go to a newly created file only.
    path.unlink(missing_ok=True)
    _fill(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file.mode), file)
    with contextlib.suppress(FileNotFoundError, PermissionError):
        # If root gave the files to a container's user, that user can still read them after a renewal.
        owner = (folder / file.name).stat()
        os.chown(path, owner.st_uid, owner.st_gid)


def _fill(descriptor: int, file: File) -> None:
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(file.content)
        opened.flush()
        os.fsync(opened.fileno())
